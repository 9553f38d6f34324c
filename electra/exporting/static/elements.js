// Small helpers for the parts of the page.

export const find = (id) => document.getElementById(id);

/** A new element with attributes, CSS variables (--name), listeners (onname) and children. */
export function element(name, attributes = {}, ...children) {
  const created = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("--")) created.style.setProperty(key, value);
    else if (key.startsWith("on")) created.addEventListener(key.slice(2), value);
    else if (value === true) created.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) created.setAttribute(key, value);
  }
  created.append(...children);
  return created;
}

/** 0.934 → 93 %; between 0 and 1 % the first digits that are not 0. */
export function percent(probability) {
  const value = 100 * probability;
  if (value >= 1 || value === 0) return `${Math.round(value)}\u00a0%`;
  return value < 0.01 ? "<\u00a00.01\u00a0%" : `${value.toPrecision(1)}\u00a0%`;
}

/** A row of a bar chart: a name, its bar and its value; with `choose`, a button. */
export function bar(name, value, { choose, label, share = value, isMarked = false } = {}) {
  const content = [
    element("span", { class: "name" }, name),
    element("span", { class: "track", "aria-hidden": "true" }, element("i", { "--share": Math.max(0, Math.min(1, share)) })),
    element("span", { class: "value" }, typeof value === "number" ? percent(value) : value),
  ];
  const row = choose
    ? element("button", { type: "button", class: "bar", onclick: choose, "aria-label": label }, ...content)
    : element("div", { class: "bar" }, ...content);
  if (isMarked) row.classList.add("marked");
  return element("li", {}, row);
}

/** Calls a function after a pause in calls. */
export function debounce(milliseconds, callback) {
  let timer = null;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => callback(...values), milliseconds);
  };
}

/** A text area grows with its text. */
export function fitToText(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

export const prefersStillness = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
