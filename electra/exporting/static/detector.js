// Replaced token detection: a sentence whose tokens are coloured by their probability of being replaced.
import { bar, debounce, element, find, fitToText, percent, prefersStillness } from "./elements.js";

const SHARE = 0.15; // of the words that the generator replaces: the mask fraction of pre-training
const SHOWN = 0.1; // probabilities from here on are written below their word
const MOVED = 0.05; // a probability that changed by less is not marked

export async function startDetector(model, about) {
  const hasGenerator = about.models.includes("generator");
  const area = find("text");
  let state = { text: about.examples[0][0], changes: [] }; // changes: {start, end, original}, of words in the text
  let history = [];
  let shown = []; // the words that are shown
  let shownText = state.text; // the text that they are from
  let isEdit = false; // whether the last change was the replacement of a word
  let chosen = null; // index of a word

  find("lede").textContent =
    "A discriminator reads your sentence and gives every token the probability that it was replaced by another one. " +
    (hasGenerator ? "Type, or choose a word and let the generator replace it: watch the probabilities change." : "Type, or choose a word and replace it.");
  find("about-method").textContent =
    "In pre-training, a small generator fills masked positions of a text with plausible tokens, and the discriminator " +
    "learns to tell which tokens were replaced. It learns from every token of a text, not only from the masked ones " +
    "(ELECTRA, Clark et al. 2020).";
  find("corrupt").hidden = !hasGenerator;

  const detect = model.newest("detect", show);

  function setText(text, changes = [], edited = false) {
    if (text !== state.text) history.push(state);
    state = { text, changes };
    isEdit = edited;
    if (area.value !== text) area.value = text;
    fitToText(area);
    find("undo").disabled = history.length === 0;
    return detect({ text });
  }

  function show(result, { text }) {
    if (text !== state.text) return;
    const focused = document.activeElement?.closest?.("#reading .word")?.dataset.index;
    const before = isEdit && shown.length === result.words.length ? shown : null;
    [shown, shownText] = [result.words, text];
    if (chosen !== null && !shown[chosen]) chosen = null;
    find("reading").replaceChildren(...shown.map((word, index) => wordButton(word, index, before?.[index])));
    if (focused !== undefined) find("reading").children[focused]?.focus();
    find("summary").replaceChildren(...summarize(result));
    showPanel();
  }

  function wordButton(word, index, before) {
    const moved = before ? word.probability - before.probability : 0;
    const direction = Math.abs(moved) < MOVED ? "" : moved > 0 ? "up" : "down";
    const pieces = word.isAligned ? word.tokens : [{ ...word.tokens[0], text: word.text, probability: word.probability }];
    const arrow = { up: "↑", down: "↓", "": "" }[direction];
    const number = word.probability >= SHOWN || arrow ? `${arrow}${Math.round(100 * word.probability)}` : "";
    const change = changeAt(word);
    const button = element(
      "button",
      {
        type: "button",
        class: `word ${direction}`,
        "data-index": index,
        "data-probabilities": word.tokens.map((token) => token.probability.toFixed(6)).join(" "),
        "data-changed": change !== undefined,
        "data-joined": index > 0 && word.start !== null && word.start === shown[index - 1].end,
        "aria-pressed": String(index === chosen),
        "aria-label": `${word.text}: ${percent(word.probability)} replaced${change ? `, was ${change.original}` : ""}`,
        onclick: () => choose(index === chosen ? null : index),
      },
      element("span", { class: "pieces" }, ...pieces.map((piece) => pieceSpan(piece, before))),
      element("span", { class: "percent", "aria-hidden": "true" }, number),
    );
    return button;
  }

  function pieceSpan(piece, before) {
    const span = element("span", { class: "piece", "--p": piece.probability.toFixed(3) }, piece.text);
    if (before && !prefersStillness()) span.classList.add("fresh");
    return span;
  }

  function changeAt(word) {
    return state.changes.find((change) => change.start === word.start && change.end === word.end);
  }

  function summarize({ words, isTruncated, tokens }) {
    if (!words.length) return ["Write a sentence to begin."];
    const top = words.reduce((a, b) => (b.probability > a.probability ? b : a));
    const parts = ["Most suspicious: ", element("strong", {}, top.text), ` (${percent(top.probability)}).`];
    const replaced = words.filter(changeAt);
    if (replaced.length) {
      const found = replaced.filter((word) => word.probability >= 0.5).length;
      const alarms = words.filter((word) => word.probability >= 0.5 && !changeAt(word)).length;
      const count = replaced.length === 1 ? "One word was replaced" : `${replaced.length} words were replaced`;
      parts.push(` ${count}; above 50 %: ${found} of ${replaced.length}`);
      parts.push(alarms ? `, and ${alarms} that ${alarms === 1 ? "was" : "were"} not.` : ".");
    }
    if (isTruncated) parts.push(` Only the first ${tokens} tokens are read.`);
    return parts;
  }

  function choose(index) {
    chosen = index;
    for (const [at, button] of [...find("reading").children].entries()) button.setAttribute("aria-pressed", String(at === index));
    showPanel();
    const narrow = matchMedia("(max-width: 56rem)").matches;
    if (index !== null && narrow) find("panel").scrollIntoView({ block: "nearest", behavior: prefersStillness() ? "auto" : "smooth" });
  }

  async function showPanel() {
    const panel = find("panel");
    const word = chosen === null ? undefined : shown[chosen];
    if (!word) {
      const hint = hasGenerator ? "Choose a word to see what the generator would write in its place, or to replace it." : "Choose a word to replace it.";
      panel.replaceChildren(element("h2", {}, "No word chosen"), element("p", { class: "hint" }, hint));
      return;
    }
    const change = changeAt(word);
    const field = element("input", { id: "replacement", type: "text", autocomplete: "off", spellcheck: "false", value: "", disabled: word.start === null });
    const submit = () => field.value.trim() && replaceWord(word, field.value.trim());
    field.addEventListener("keydown", (event) => event.key === "Enter" && submit());
    const suggestions = element("ol", { class: "bars" });
    panel.replaceChildren(
      element("h2", {}, element("span", { class: "chosen" }, word.text), " ", element("span", { class: "verdict" }, `${percent(word.probability)} replaced`)),
      ...(word.tokens.length > 1 ? [element("p", { class: "hint" }, `${word.tokens.length} tokens: `, word.tokens.map((token) => `${token.name} ${percent(token.probability)}`).join(" · "))] : []),
      ...(hasGenerator ? [element("p", { class: "caption" }, "The generator would write"), suggestions, element("p", { class: "hint", id: "rank" })] : []),
      element("label", { class: "caption", for: "replacement" }, "Replace it with"),
      element("p", { class: "row" }, field, element("button", { type: "button", onclick: submit }, "Replace")),
      element(
        "p",
        { class: "actions" },
        ...(hasGenerator ? [element("button", { type: "button", id: "sample", class: "quiet", onclick: () => sampleWord(word) }, "Let the generator choose")] : []),
        ...(change ? [element("button", { type: "button", class: "quiet", onclick: () => replaceWord(word, change.original) }, `Restore “${change.original}”`)] : []),
      ),
    );
    if (!hasGenerator || word.start === null) return;
    const { text } = state;
    const { best, rank, probability } = await model.call("suggest", { text, start: word.start, end: word.end });
    if (text !== state.text || shown[chosen] !== word) return;
    const highest = best[0]?.probability ?? 1;
    suggestions.replaceChildren(
      ...best.map((each) =>
        bar(each.text, each.probability, {
          share: each.probability / highest,
          isMarked: each.text.toLowerCase() === word.text.toLowerCase(),
          choose: () => replaceWord(word, each.text),
          label: `Replace ${word.text} with ${each.text}, ${percent(each.probability)}`,
        }),
      ),
    );
    find("rank").textContent = rank === null ? "" : `“${word.text}” is its choice number ${rank.toLocaleString("en")} (${percent(probability)}).`;
  }

  /** Whether words of `text` are still at their places: the user may have typed since. */
  function isCurrent(text) {
    return text === state.text && text === area.value;
  }

  async function sampleWord(word) {
    const text = shownText;
    const [sampled] = await model.call("sample", { text, places: [word] });
    if (isCurrent(text)) await replaceWord(word, sampled);
  }

  function replaceWord(word, replacement) {
    if (isCurrent(shownText)) return replaceWords([word], [replacement]);
  }

  /** Replace words, from the last to the first, so that their places stay valid. */
  function replaceWords(words, replacements) {
    let { text, changes } = state;
    for (let at = words.length - 1; at >= 0; at--) {
      const word = words[at];
      const replacement = withCaseOf(word.text, replacements[at]);
      const original = changes.find((change) => change.start === word.start)?.original ?? word.text;
      const longer = replacement.length - (word.end - word.start);
      changes = changes
        .filter((change) => change.start !== word.start)
        .map((change) => (change.start > word.start ? { ...change, start: change.start + longer, end: change.end + longer } : change));
      if (replacement !== original) changes.push({ start: word.start, end: word.start + replacement.length, original });
      text = text.slice(0, word.start) + replacement + text.slice(word.end);
    }
    return setText(text, changes, true);
  }

  async function corrupt() {
    const places = shown.filter((word) => word.start !== null && /\p{L}|\p{N}/u.test(word.text));
    const count = Math.max(1, Math.round(SHARE * places.length));
    const drawn = places.map((word) => ({ word, order: Math.random() })).sort((a, b) => a.order - b.order).slice(0, count);
    const chosenWords = drawn.map(({ word }) => word).sort((a, b) => a.start - b.start);
    if (!chosenWords.length) return;
    const text = shownText;
    const sampled = await model.call("sample", { text, places: chosenWords.map(({ start, end }) => ({ start, end })) });
    if (!isCurrent(text)) return;
    chosen = null;
    await replaceWords(chosenWords, sampled);
  }

  area.addEventListener("input", debounce(120, () => setText(area.value)));
  find("corrupt").addEventListener("click", corrupt);
  find("undo").addEventListener("click", () => {
    state = history.pop() ?? state;
    isEdit = true;
    area.value = state.text;
    fitToText(area);
    find("undo").disabled = history.length === 0;
    detect({ text: state.text });
  });
  find("reading").addEventListener("keydown", moveFocus);

  find("detector").hidden = false;
  area.value = state.text;
  fitToText(area);
  show(await model.call("detect", { text: state.text }), { text: state.text });
  showGallery(model, about.examples, (text) => {
    chosen = null;
    setText(text);
    find("main").scrollIntoView({ behavior: prefersStillness() ? "auto" : "smooth" });
    area.focus({ preventScroll: true });
  });
}

/** The left and right arrow keys move between words. */
function moveFocus(event) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const word = event.target.closest(".word");
  if (!step || !word) return;
  event.preventDefault();
  (step < 0 ? word.previousElementSibling : word.nextElementSibling)?.focus();
}

function withCaseOf(word, replacement) {
  const first = word.slice(0, 1);
  const isCapital = first !== first.toLowerCase() && replacement === replacement.toLowerCase();
  return isCapital ? replacement.slice(0, 1).toUpperCase() + replacement.slice(1) : replacement;
}

/** Cards with coloured examples. */
async function showGallery(model, examples, load) {
  const cards = examples.map(([text]) => element("button", { type: "button", class: "card", onclick: () => load(text) }, text));
  find("gallery").replaceChildren(...cards.map((card) => element("li", {}, card)));
  for (const [index, [text]] of examples.entries()) {
    const { words } = await model.call("detect", { text });
    const parts = [];
    let at = 0;
    for (const word of words) {
      if (word.start === null) break;
      for (const token of word.isAligned ? word.tokens : [{ ...word, probability: word.probability }]) {
        parts.push(text.slice(at, token.start), element("span", { class: "piece", "--p": token.probability.toFixed(3) }, text.slice(token.start, token.end)));
        at = token.end;
      }
    }
    cards[index].replaceChildren(...parts, text.slice(at));
  }
}
