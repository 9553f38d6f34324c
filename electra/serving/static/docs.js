// The endpoints of /openapi.json, each with a request that can be edited and sent.

const description = await (await fetch("openapi.json")).json();

function element(name, text, ...children) {
  const node = document.createElement(name);
  node.textContent = text;
  node.append(...children);
  return node;
}

function resolve(schema) {
  return schema.$ref ? description.components.schemas[schema.$ref.split("/").at(-1)] : schema;
}

function typeName(schema) {
  schema = resolve(schema);
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeName).filter((name) => name !== "null").join(" | ");
  if (schema.type === "array") {
    const limit = schema.maxItems ? `1 to ${schema.maxItems} ` : "";
    return `list of ${limit}${typeName(schema.items ?? {})}`;
  }
  return schema.type ?? "any";
}

function fieldTable(schema, required) {
  const table = element("table", "");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const note = required.includes(name) ? "required" : field.default == null ? "optional" : `default ${field.default}`;
    table.append(element("tr", "", element("th", name), element("td", typeName(field)), element("td", note), element("td", field.description ?? "")));
  }
  return table;
}

function curlCommand(method, path, body) {
  const url = new URL(path, location.href);
  if (method === "get") return `curl ${url}`;
  return `curl ${url} -H 'content-type: application/json' -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
}

async function send(method, path, body, output) {
  output.textContent = "…";
  try {
    const response = await fetch(path, method === "get" ? {} : { method: "POST", headers: { "content-type": "application/json" }, body });
    const text = await response.text();
    const isJson = response.headers.get("content-type")?.includes("json");
    output.textContent = `${response.status}\n${isJson ? JSON.stringify(JSON.parse(text), null, 1) : text}`;
  } catch (error) {
    output.textContent = String(error);
  }
}

function endpointSection(path, method, endpoint) {
  const section = element("section", "", element("h2", `${method.toUpperCase()} ${path}`), element("p", endpoint.summary));
  const content = endpoint.requestBody?.content["application/json"];
  const output = element("pre", "");
  output.hidden = true;
  const button = element("button", "Send");
  let request = null;
  if (content) {
    const schema = resolve(content.schema);
    const example = schema.examples[0];
    request = element("textarea", JSON.stringify(example, null, 1));
    request.rows = 5;
    request.setAttribute("aria-label", `Request to ${path}`);
    section.append(fieldTable(schema, schema.required ?? []), request, element("pre", curlCommand(method, path, example)));
  } else {
    section.append(element("pre", curlCommand(method, path)));
  }
  button.addEventListener("click", () => {
    output.hidden = false;
    send(method, path, request?.value, output);
  });
  section.append(button, output);
  return section;
}

document.title = description.info.title;
document.querySelector("h1").textContent = description.info.title;
document.querySelector("#summary").textContent = description.info.summary;
const main = document.querySelector("main");
for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, endpoint] of Object.entries(methods)) main.append(endpointSection(path, method, endpoint));
}
