// Runs the models, so that the page never waits: answers messages {id, method, parameters} with {id, result or error}.
import * as ort from "./vendor/ort.wasm.min.mjs";
import { Words } from "./tokens.js";

const MODEL = new URL("./model/", import.meta.url);
const SUGGESTIONS = 8;
const MAX_QUESTION = 64; // tokens
const MAX_ANSWER = 30; // tokens

ort.env.wasm.numThreads = 1; // several need headers that static hosts do not send
ort.env.wasm.wasmPaths = new URL("./vendor/", import.meta.url).href;
ort.env.logLevel = "error";

let about, words, special;
const sessions = {};

const json = async (name) => (await get(name)).json();
const sigmoid = (logit) => 1 / (1 + Math.exp(-logit));

async function get(name) {
  const response = await fetch(new URL(name, MODEL));
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return response;
}

function softmax(logits) {
  const highest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = Float64Array.from(logits, (logit) => Math.exp(logit - highest));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

/** A session of a model, which is loaded when it is first needed. */
function session(name) {
  sessions[name] ??= get(`${name}.onnx`)
    .then((response) => response.arrayBuffer())
    .then((buffer) => ort.InferenceSession.create(new Uint8Array(buffer), { executionProviders: ["wasm"] }));
  return sessions[name];
}

/** The outputs of a model for token ids, by name; `axes` are those before the length. */
async function run(name, ids, segments = ids.map(() => 0), axes = [1]) {
  const values = { input_ids: ids, attention_mask: ids.map(() => 1), token_type_ids: segments };
  const feeds = {};
  for (const input of about.inputs) {
    feeds[input] = new ort.Tensor("int64", BigInt64Array.from(values[input], BigInt), [...axes, ids.length]);
  }
  return (await session(name)).run(feeds);
}

const methods = {
  async load() {
    const [description, tokenizer, settings] = await Promise.all(
      ["model.json", "tokenizer.json", "tokenizer_config.json"].map(json),
    );
    about = description;
    words = new Words(tokenizer, settings, about.tokens);
    const ids = words.tokenizer.get_vocab();
    special = Object.fromEntries(Object.entries(about.tokens).map(([role, token]) => [role, ids.get(token)]));
    await session(about.models[0]);
    return about;
  },

  /** The words of a text with the probability of each token that it was replaced. */
  async detect({ text }) {
    const split = words.split(text);
    const { ids, before, read: tokensRead } = withSpecialTokens(split.ids);
    const { logits } = await run("discriminator", ids);
    const [data, size] = [logits.data, logits.dims.length === 3 ? logits.dims[2] : 1];
    const probability = (place) => sigmoid(size === 1 ? data[place] : data[place * size + 1] - data[place * size]);
    const read = [];
    for (const word of split.words) {
      const tokens = word.tokens.map((token, index) => ({ ...token, place: before + word.first + index }));
      if (tokens[tokens.length - 1].place >= before + tokensRead) break;
      for (const token of tokens) token.probability = probability(token.place);
      read.push({ ...word, tokens, probability: Math.max(...tokens.map((token) => token.probability)) });
    }
    return { words: read, isTruncated: tokensRead < split.ids.length, tokens: ids.length };
  },

  /** What the generator would write in place of the word from `start` to `end`; where the word itself stands. */
  async suggest({ text, start, end }) {
    const [predicted] = await predictMasked(text, [{ start, end }]);
    const order = [...predicted.keys()].sort((a, b) => predicted[b] - predicted[a]);
    const best = [];
    for (const id of order) {
      if (best.length === SUGGESTIONS) break;
      if (words.startsWord(words.name(id))) best.push({ text: words.textOf(words.name(id)), probability: predicted[id] });
    }
    const own = words.encode(text.slice(start, end));
    const rank = own.length === 1 ? order.indexOf(own[0]) + 1 : null;
    return { best, rank, probability: own.length === 1 ? predicted[own[0]] : null };
  },

  /** A sample of the generator for each of these places in a text; all of them are masked together. */
  async sample({ text, places }) {
    const predictions = await predictMasked(text, places);
    return predictions.map((predicted) => {
      const candidates = [...predicted.keys()].filter((id) => words.startsWord(words.name(id)));
      let rest = Math.random() * candidates.reduce((sum, id) => sum + predicted[id], 0);
      const chosen = candidates.find((id) => (rest -= predicted[id]) <= 0) ?? candidates[0];
      return words.textOf(words.name(chosen));
    });
  },

  /** Probabilities of classes, or a score, of one or two texts. */
  async classify({ texts }) {
    const { ids, segments, isTruncated } = joinTexts(texts);
    const logits = Array.from((await run("classifier", ids, segments)).logits.data);
    const values = { classification: softmax, "multi-label": (each) => each.map(sigmoid) }[about.kind]?.(logits) ?? logits;
    return { values: Array.from(values), isTruncated };
  },

  /** Probabilities of choices, the lines of the last text: each is read after the second text, or as the second. */
  async choose({ texts }) {
    const choices = texts.at(-1).split("\n").map((line) => line.trim()).filter(Boolean);
    const [first, middle] = [texts.slice(0, -1).slice(0, 1), texts.slice(1, -1)];
    const rows = choices.map((choice) => joinTexts([...first, [...middle, choice].join(" ")]));
    const logits = [];
    for (const { ids, segments } of rows) logits.push((await run("classifier", ids, segments, [1, 1])).logits.data[0]);
    return { choices, values: Array.from(softmax(logits)), isTruncated: rows.some((row) => row.isTruncated) };
  },

  /** The words of a text with their most likely tag; the first token of a word counts. */
  async tag({ texts: [text] }) {
    const split = words.split(text, "plain");
    const ids = [special.cls, ...split.ids.slice(0, about.length - 2), special.sep];
    const { data, dims } = (await run("classifier", ids)).logits;
    const size = dims[2];
    const tagged = split.words
      .filter((word) => word.first + 1 < ids.length - 1)
      .map((word) => {
        const scores = softmax(data.subarray((1 + word.first) * size, (2 + word.first) * size));
        const best = scores.indexOf(Math.max(...scores));
        return { ...word, label: about.labels[best], probability: scores[best] };
      });
    if (about.has_entities) tagged.forEach((word, at) => (word.label = startEntity(word.label, tagged[at - 1]?.label)));
    return { words: tagged, isTruncated: tagged.length < split.words.length };
  },

  /** The best answers to a question from the start of a context that fits into the model. */
  async answer({ texts: [question, context] }) {
    const maxQuestion = Math.min(MAX_QUESTION, Math.floor((about.length - 3) / 2));
    const asked = words.split(question, "plain").ids.slice(0, maxQuestion);
    const split = words.split(context, "plain");
    const kept = split.ids.slice(0, about.length - 3 - asked.length);
    const ids = [special.cls, ...asked, special.sep, ...kept, special.sep];
    const first = asked.length + 2;
    const outputs = await run("classifier", ids, ids.map((_, place) => Number(place >= first)));
    const [starts, ends] = ["start_logits", "end_logits"].map((name) => spanLogProbabilities(outputs[name].data, first));
    const wordOf = split.words.flatMap((word) => word.tokens.map(() => word));
    const spans = [];
    for (let from = 0; from < kept.length; from++) {
      for (let to = from; to < Math.min(from + MAX_ANSWER, kept.length); to++) {
        spans.push({ from, to, score: starts[1 + from] + ends[1 + to] });
      }
    }
    spans.sort((a, b) => b.score - a.score);
    const answers = new Map();
    for (const { from, to, score } of spans.slice(0, 20)) {
      const [start, end] = [wordOf[from].start, wordOf[to].end];
      const text = context.slice(start, end).trim();
      if (text && !answers.has(text)) answers.set(text, { text, start, end, probability: Math.exp(score) });
    }
    const nullOdds = starts[0] + ends[0] - (spans[0]?.score ?? 0);
    const isAnswered = !(about.has_unanswerable && nullOdds > about.null_threshold);
    return { answers: [...answers.values()].slice(0, 5), isAnswered, isTruncated: kept.length < split.ids.length };
  },

  /** The names of all tokens by id. */
  async vocabulary() {
    const names = [];
    for (const [name, id] of words.tokenizer.get_vocab()) names[id] = name;
    return Array.from({ length: about.vocabulary }, (_, id) => names[id] ?? "");
  },
};

/** An I- that continues no entity is a B-. */
function startEntity(label, before = "O") {
  return label.startsWith("I-") && before.slice(2) !== label.slice(2) ? `B-${label.slice(2)}` : label;
}

/** Log-probabilities of [CLS] and the tokens of the context, which starts at `first` and ends before the last [SEP]. */
function spanLogProbabilities(logits, first) {
  const allowed = [logits[0], ...logits.subarray(first, -1)];
  const highest = Math.max(...allowed);
  const logSum = highest + Math.log(allowed.reduce((sum, logit) => sum + Math.exp(logit - highest), 0));
  return allowed.map((logit) => logit - logSum);
}

/** Token ids, truncated, with the special tokens that the tokenizer adds; the number of those before the text, and how
 * many tokens of the text are left. */
function withSpecialTokens(ids) {
  const [alone, plain] = [words.tokenizer.encode("a").ids, words.encode("a")];
  const before = Math.max(0, alone.findIndex((_, at) => plain.every((id, index) => alone[at + index] === id)));
  const after = alone.slice(before + plain.length);
  const kept = ids.slice(0, about.length - before - after.length);
  return { ids: [...alone.slice(0, before), ...kept, ...after], before, read: kept.length };
}

/** The generator's probabilities of all tokens at places of a text, in their order, which are masked. */
async function predictMasked(text, places) {
  const parts = [];
  const numbers = []; // of the masks among all of the text, which may have some itself
  let at = 0;
  for (const { start, end } of places) {
    parts.push(text.slice(at, start), about.tokens.mask);
    numbers.push(parts.join("").split(about.tokens.mask).length - 2);
    at = end;
  }
  const { ids } = withSpecialTokens(words.encode(parts.join("") + text.slice(at)));
  const masks = ids.flatMap((id, place) => (id === special.mask ? [place] : []));
  const { logits } = await run("generator", ids);
  const size = logits.dims[2];
  return numbers.map((number) => softmax(logits.data.subarray(masks[number] * size, (masks[number] + 1) * size)));
}

/** [CLS] text [SEP], or [CLS] text [SEP] second text [SEP]: of two texts the longer is shortened first. */
function joinTexts(texts) {
  const all = texts.map((text) => words.split(text, "plain").ids);
  const room = about.length - 1 - all.length;
  const lengths = truncatedLengths(all.map((each) => each.length), room);
  const parts = all.map((each, index) => [...each.slice(0, lengths[index]), special.sep]);
  const ids = [special.cls, ...parts.flat()];
  const segments = ids.map((_, place) => Number(place > parts[0].length));
  return { ids, segments, isTruncated: all.some((each, index) => each.length > lengths[index]) };
}

function truncatedLengths(lengths, room) {
  if (lengths.reduce((a, b) => a + b, 0) <= room) return lengths;
  if (lengths.length === 1) return [room];
  const shorter = Math.min(...lengths, Math.floor(room / 2));
  return lengths[0] > lengths[1] ? [room - shorter, shorter] : [shorter, room - shorter];
}

onmessage = async ({ data: { id, method, parameters } }) => {
  try {
    postMessage({ id, result: await methods[method](parameters ?? {}) });
  } catch (error) {
    postMessage({ id, error: String(error?.message ?? error) });
  }
};
