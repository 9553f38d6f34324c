// Prints, as JSON, the token ids and outputs of texts by a model in a local folder:
// node outputs.mjs CLASS FOLDER DTYPE TEXT...
import * as transformers from "@huggingface/transformers";
import path from "node:path";

const [className, folder, dtype, ...texts] = process.argv.slice(2);
transformers.env.allowRemoteModels = false;
transformers.env.localModelPath = path.dirname(folder) + "/";
const name = path.basename(folder);
const tokenizer = await transformers.AutoTokenizer.from_pretrained(name);
const model = await transformers[className].from_pretrained(name, { dtype });
const inputs = await tokenizer(texts, { padding: true, truncation: true });
const outputs = await model(inputs);
const lists = Object.entries({ input_ids: inputs.input_ids, ...outputs }).filter(([, value]) => value?.tolist);
const plain = (key, value) => (typeof value === "bigint" ? Number(value) : value);
console.log(JSON.stringify(Object.fromEntries(lists.map(([key, value]) => [key, value.tolist()])), plain));
