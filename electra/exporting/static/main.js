// Starts the page: loads the model in a worker and hands it to the parts that a model of its kind has.
import { startClassifier } from "./classifier.js";
import { startDetector } from "./detector.js";
import { element, find } from "./elements.js";
import { startMap } from "./map.js";

/** Calls of the worker's methods as promises. */
class Model {
  constructor() {
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.pending = new Map();
    this.count = 0;
    this.worker.onmessage = ({ data: { id, result, error } }) => {
      const { resolve, reject } = this.pending.get(id);
      this.pending.delete(id);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
    this.worker.onerror = (event) => {
      for (const { reject } of this.pending.values()) reject(new Error(event.message || "the worker cannot start"));
    };
  }

  call(method, parameters) {
    const id = this.count++;
    this.worker.postMessage({ id, method, parameters });
    return new Promise((resolve, reject) => this.pending.set(id, { resolve, reject }));
  }

  /** A function that calls a method and `show`s its result; while one call runs, only the newest of others is kept. */
  newest(method, show, fail = showError) {
    let running = false;
    let waiting = null;
    return async function call(parameters) {
      if (running) {
        waiting = parameters;
        return;
      }
      running = true;
      try {
        const result = await this.call(method, parameters);
        if (waiting === null) show(result, parameters);
      } catch (error) {
        fail(error);
      }
      running = false;
      if (waiting !== null) {
        const next = waiting;
        waiting = null;
        await call.call(this, next);
      }
    }.bind(this);
  }
}

function showStatus(text) {
  find("status").replaceChildren(text);
  find("status").hidden = text === "";
}

function showError(error) {
  find("status").classList.add("failed");
  showStatus(`Something failed: ${error.message}`);
}

function startTheme() {
  const set = (theme) => (document.documentElement.dataset.theme = theme);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = localStorage.getItem("theme");
  if (stored) set(stored);
  find("theme").addEventListener("click", () => {
    const theme = (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark" ? "light" : "dark";
    set(theme);
    localStorage.setItem("theme", theme);
    document.dispatchEvent(new Event("theme"));
  });
  dark.addEventListener("change", () => document.dispatchEvent(new Event("theme")));
}

function showFacts(about) {
  const count = (number) => number.toLocaleString("en");
  const facts = [
    ["Model", about.name],
    ["Parameters", Object.entries(about.parameters).map(([name, size]) => `${count(size)} (${name})`).join(", ")],
    ["Encoder", `${about.layers} layer${about.layers > 1 ? "s" : ""} of width ${about.width}`],
    ["Vocabulary", `${count(about.vocabulary)} tokens`],
    ["Longest text", `${count(about.length)} tokens`],
    ["Weights", [...new Set(Object.values(about.precision))].join(" and ")],
  ];
  find("facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
  find("model-name").textContent = about.name;
  document.title = `electra · ${about.name}`;
}

async function start() {
  startTheme();
  showStatus("Loading the model…");
  const model = new Model();
  const about = await model.call("load");
  showFacts(about);
  const startModel = about.kind === "detection" ? startDetector : startClassifier;
  await startModel(model, about);
  showStatus("");
  document.documentElement.dataset.ready = "true"; // for tests
  if (about.neighbors) await startMap(model, about);
}

start().catch(showError);
