// A map of the vocabulary on a canvas: move, zoom, search, nearest neighbours.
import { bar, element, find, prefersStillness } from "./elements.js";

const GRID = 65535;
const TYPES = [
  { name: "words", test: (name) => /^[Ġ▁]?\p{L}/u.test(name) },
  { name: "parts of words", test: (name) => name.startsWith("##") },
  { name: "numbers", test: (name) => /^[Ġ▁]?\p{N}/u.test(name) },
  { name: "signs", test: () => true },
];
const MAX_ZOOM = 200;
const FLIGHT = 600; // milliseconds

export async function startMap(model, about) {
  const [names, buffer] = await Promise.all([
    model.call("vocabulary"),
    fetch(new URL("./model/map.bin", import.meta.url)).then((response) => response.arrayBuffer()),
  ]);
  const [size, degree] = [about.vocabulary, about.neighbors];
  const neighbors = new Int32Array(buffer, 0, size * degree);
  const places = new Uint16Array(buffer, 4 * size * degree, 2 * size);
  const cosines = new Int8Array(buffer, 4 * size * degree + 4 * size, size * degree);
  const isShown = names.map((name) => name !== "" && !/^\[.*\]$|^<.*>$/.test(name));
  const isPart = (name) => name.startsWith("##");
  const types = names.map((name) => (isPart(name) ? 1 : TYPES.findIndex((type) => type.test(name))));
  const ids = names.map((_, id) => id).filter((id) => isShown[id]);
  const x = (id) => places[2 * id] / GRID;
  const y = (id) => places[2 * id + 1] / GRID;

  const canvas = find("canvas");
  const context = canvas.getContext("2d");
  let view = { x: 0.5, y: 0.5, zoom: 1 }; // centre, and how much of the map is seen: 1 is all
  let [width, height, selected, hovered, colors, frame] = [0, 0, null, null, null, null];

  find("map").hidden = false;
  find("legend").replaceChildren(...TYPES.map((type, index) => element("li", { class: `type-${index}` }, type.name)));

  const scale = () => 0.92 * Math.min(width, height) * view.zoom;
  const screen = (id) => [width / 2 + (x(id) - view.x) * scale(), height / 2 + (y(id) - view.y) * scale()];

  function readColors() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const probe = (name) => {
      canvas.style.color = `var(${name})`;
      return getComputedStyle(canvas).color;
    };
    colors = { types: TYPES.map((_, index) => probe(`--type-${index}`)), ink: probe("--ink"), paper: probe("--card"), hot: probe("--hot-ink"), font: color("--sans") || "sans-serif" };
  }

  function resize() {
    const box = canvas.getBoundingClientRect();
    const ratio = devicePixelRatio || 1;
    [width, height] = [box.width, box.height];
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    redraw();
  }

  function redraw() {
    frame ??= requestAnimationFrame(() => {
      frame = null;
      draw();
    });
  }

  function draw() {
    if (!colors) readColors();
    context.clearRect(0, 0, width, height);
    const radius = Math.min(4, 1.1 + 0.45 * Math.log2(view.zoom + 1));
    const near = selected === null ? new Set() : new Set(neighborsOf(selected).map(({ id }) => id));
    for (const [type, color] of colors.types.entries()) {
      context.fillStyle = color;
      context.globalAlpha = selected === null ? 0.6 : 0.28;
      for (const id of ids) {
        if (types[id] !== type) continue;
        const [left, top] = screen(id);
        if (left < -5 || top < -5 || left > width + 5 || top > height + 5) continue;
        context.beginPath();
        context.arc(left, top, radius, 0, 7);
        context.fill();
      }
    }
    context.globalAlpha = 1;
    if (selected !== null) {
      const [left, top] = screen(selected);
      context.strokeStyle = colors.hot;
      context.lineWidth = 1;
      for (const id of near) {
        const [toLeft, toTop] = screen(id);
        context.globalAlpha = 0.5;
        context.beginPath();
        context.moveTo(left, top);
        context.lineTo(toLeft, toTop);
        context.stroke();
      }
      context.globalAlpha = 1;
      context.fillStyle = colors.hot;
      for (const id of [selected, ...near]) {
        const [toLeft, toTop] = screen(id);
        context.beginPath();
        context.arc(toLeft, toTop, radius + (id === selected ? 3 : 1), 0, 7);
        context.fill();
      }
    }
    drawLabels([hovered, selected, ...near].filter((id) => id !== null && id !== undefined), near);
  }

  /** Names of tokens, the most frequent ones first, where they do not cover each other. */
  function drawLabels(first, near) {
    const taken = [];
    const limit = Math.round((width * height) / 9000);
    const rest = ids.filter((id) => types[id] === 0 || view.zoom > 4);
    let count = 0;
    for (const id of new Set([...first, ...rest])) {
      if (count >= limit + first.length) break;
      const [left, top] = screen(id);
      if (left < 0 || top < 0 || left > width || top > height) continue;
      const isFirst = id === selected || id === hovered;
      const font = isFirst ? 15 : near.has(id) ? 13 : 12;
      const extent = 0.55 * font * names[id].length;
      const box = [left - extent / 2 - 4, top - font - 6, left + extent / 2 + 4, top - 2];
      if (!isFirst && taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      count++;
      context.font = `${isFirst ? 600 : 400} ${font}px ${colors.font}`;
      context.textAlign = "center";
      context.lineWidth = 4;
      context.lineJoin = "round";
      context.strokeStyle = colors.paper;
      context.strokeText(names[id], left, top - 6);
      context.fillStyle = isFirst || near.has(id) ? colors.hot : colors.ink;
      context.fillText(names[id], left, top - 6);
    }
  }

  function neighborsOf(id) {
    return Array.from({ length: degree }, (_, k) => ({ id: neighbors[id * degree + k], cosine: cosines[id * degree + k] / 127 }));
  }

  function nearestTo(left, top) {
    let [best, distance] = [null, 18 ** 2];
    for (const id of ids) {
      const [toLeft, toTop] = screen(id);
      const squared = (toLeft - left) ** 2 + (toTop - top) ** 2;
      if (squared < distance) [best, distance] = [id, squared];
    }
    return best;
  }

  function select(id, fly = true) {
    selected = id;
    const rows = neighborsOf(id).filter((each) => isShown[each.id]);
    find("token").replaceChildren(
      element("h2", {}, element("span", { class: "chosen" }, names[id])),
      element("p", { class: "caption" }, "Nearest neighbours, by cosine"),
      element("ol", { class: "bars" }, ...rows.map((each) => bar(names[each.id], each.cosine.toFixed(2), { share: each.cosine, choose: () => select(each.id), label: `${names[each.id]}, cosine ${each.cosine.toFixed(2)}` }))),
    );
    if (fly) flyTo({ x: x(id), y: y(id), zoom: zoomFor(id, rows) });
    redraw();
  }

  /** A zoom that shows most of the neighbours of a token. */
  function zoomFor(id, rows) {
    const distances = rows.map((each) => Math.hypot(x(each.id) - x(id), y(each.id) - y(id))).sort((a, b) => a - b);
    const far = distances[Math.floor(0.7 * (distances.length - 1))] ?? 1;
    return Math.max(1.5, Math.min(12, 0.36 / far));
  }

  function flyTo(target) {
    if (prefersStillness()) {
      view = target;
      return redraw();
    }
    const [from, start] = [view, performance.now()];
    const step = (now) => {
      const t = Math.min(1, (now - start) / FLIGHT);
      const eased = t * t * (3 - 2 * t);
      view = { x: from.x + (target.x - from.x) * eased, y: from.y + (target.y - from.y) * eased, zoom: from.zoom * (target.zoom / from.zoom) ** eased };
      redraw();
      if (t < 1 && view !== null) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  function zoomAt(factor, left = width / 2, top = height / 2) {
    const [atX, atY] = [view.x + (left - width / 2) / scale(), view.y + (top - height / 2) / scale()];
    view = { ...view, zoom: Math.max(0.7, Math.min(MAX_ZOOM, view.zoom * factor)) };
    view.x = atX - (left - width / 2) / scale();
    view.y = atY - (top - height / 2) / scale();
    redraw();
  }

  function moveBy(left, top) {
    view = { ...view, x: Math.max(-0.2, Math.min(1.2, view.x - left / scale())), y: Math.max(-0.2, Math.min(1.2, view.y - top / scale())) };
    redraw();
  }

  const pointers = new Map();
  let travelled = 0;
  const local = (event) => [event.offsetX, event.offsetY];
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, local(event));
    travelled = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = local(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      const id = nearestTo(...now);
      if (id !== hovered) {
        hovered = id;
        canvas.classList.toggle("over", id !== null);
        redraw();
      }
      return;
    }
    const other = [...pointers].find(([id]) => id !== event.pointerId)?.[1];
    pointers.set(event.pointerId, now);
    travelled += Math.hypot(now[0] - before[0], now[1] - before[1]);
    if (!other) return moveBy(now[0] - before[0], now[1] - before[1]);
    const distance = (a) => Math.hypot(a[0] - other[0], a[1] - other[1]);
    if (distance(before) > 0) zoomAt(distance(now) / distance(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
  });
  const release = (event) => {
    if (pointers.delete(event.pointerId) && event.type === "pointerup" && travelled < 6) {
      const id = nearestTo(...local(event));
      if (id !== null) select(id, false);
    }
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => {
    hovered = null;
    redraw();
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoomAt(Math.exp(-0.0015 * event.deltaY), ...local(event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const actions = { ArrowLeft: () => moveBy(60, 0), ArrowRight: () => moveBy(-60, 0), ArrowUp: () => moveBy(0, 60), ArrowDown: () => moveBy(0, -60), "+": () => zoomAt(1.4), "=": () => zoomAt(1.4), "-": () => zoomAt(1 / 1.4), 0: showAll };
    const action = actions[event.key];
    if (!action || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    action();
  });
  function showAll() {
    flyTo({ x: 0.5, y: 0.5, zoom: 1 });
  }
  find("zoom-in").addEventListener("click", () => zoomAt(1.6));
  find("zoom-out").addEventListener("click", () => zoomAt(1 / 1.6));
  find("zoom-all").addEventListener("click", showAll);

  const bare = (id) => names[id].replace(/^[Ġ▁]/, "").toLowerCase();
  function search() {
    const wanted = find("search").value.trim().toLowerCase();
    const starts = wanted ? ids.filter((id) => bare(id).startsWith(wanted)) : [];
    starts.sort((a, b) => bare(a).length - bare(b).length || a - b);
    find("matches").replaceChildren(...starts.slice(0, 8).map((id) => element("li", {}, element("button", { type: "button", class: "chip", onclick: () => select(id) }, names[id]))));
    if (wanted && !starts.length) find("matches").replaceChildren(element("li", { class: "hint" }, "no token starts like this"));
    return starts[0];
  }
  find("search").addEventListener("input", search);
  find("search").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    const id = search();
    if (id !== undefined) select(id);
  });

  document.addEventListener("theme", () => {
    colors = null;
    redraw();
  });
  new ResizeObserver(resize).observe(canvas);
  canvas.dataset.ready = "true"; // for tests
}
