// Fine-tuned models: scores of classes, tags of words, answers to questions, multiple choice.
import { bar, debounce, element, find, fitToText, percent, prefersStillness } from "./elements.js";

const HUES = 8; // colours of tags

const KINDS = {
  classification: { title: "Which class is it?", lede: "A fine-tuned model reads your text and gives every class a probability.", method: "classify", show: showScores },
  "multi-label": { title: "Which labels fit?", lede: "A fine-tuned model reads your text and gives every label a probability of its own.", method: "classify", show: showScores },
  regression: { title: "How high is the score?", lede: "A fine-tuned model reads your text and predicts a score.", method: "classify", show: showScore },
  tags: { title: "Which tag has each word?", lede: "A fine-tuned model reads your text and tags every word.", method: "tag", show: showTags },
  "question-answering": { title: "What is the answer?", lede: "A fine-tuned model finds the answer to your question in a text.", method: "answer", show: showAnswers },
  choice: { title: "Which choice is right?", lede: "A fine-tuned model reads your text with each choice and gives every choice a probability.", method: "choose", show: showChoices },
};

export async function startClassifier(model, about) {
  const kind = KINDS[about.kind];
  const isQuestion = about.kind === "question-answering";
  const isChoice = about.kind === "choice"; // its last field has one choice per line
  const names = isQuestion ? ["question", "context"] : [...about.columns, ...(isChoice ? ["choices, one per line"] : [])];
  const examples = about.examples.filter((texts) => texts.length >= names.length + isChoice);
  find("title").textContent = kind.title;
  find("lede").textContent = kind.lede;
  find("about-method").textContent =
    "A pre-trained text encoder was trained further on labelled examples of one task: its head turns the hidden states " +
    "of a text into the scores that are shown here.";
  const areas = names.map((name, index) => {
    const area = element("textarea", { id: `text-${index}`, rows: isQuestion && index === 1 ? 5 : isChoice && index === names.length - 1 ? 4 : 2, spellcheck: "false", maxlength: "5000" });
    find("fields").append(element("label", { class: "caption", for: area.id }, name), area);
    return area;
  });
  const show = (result, { texts }) => kind.show(result, texts, about);
  const ask = model.newest(kind.method, show);
  const read = () => areas.map((area) => area.value);
  const update = () => {
    areas.forEach(fitToText);
    const texts = read();
    if (texts.every((text) => text.trim())) return ask({ texts });
    find("class-summary").textContent = "Write a text to begin.";
  };
  for (const area of areas) area.addEventListener("input", debounce(150, update));
  const load = (texts) => {
    areas.forEach((area, index) => (area.value = texts[index] ?? ""));
    if (isChoice) areas.at(-1).value = texts.slice(names.length - 1).join("\n");
    return update();
  };
  find("classifier").hidden = false;
  await load(examples[0] ?? []);
  find("examples").hidden = examples.length === 0;
  find("gallery").replaceChildren(
    ...examples.map((texts) => {
      const open = () => {
        load(texts);
        find("main").scrollIntoView({ behavior: prefersStillness() ? "auto" : "smooth" });
        areas[0].focus({ preventScroll: true });
      };
      const parts = names.length > 1 || isChoice ? texts.map((text) => element("p", {}, text)) : texts.slice(0, 1);
      return element("li", {}, element("button", { type: "button", class: "card", onclick: open }, ...parts));
    }),
  );
}

function note(isTruncated, length) {
  return isTruncated ? ` Only the first ${length} tokens are read.` : "";
}

function showScores({ values, isTruncated }, texts, about) {
  const order = [...values.keys()].sort((a, b) => values[b] - values[a]);
  const isSingle = about.kind === "classification";
  const predicted = isSingle ? order.slice(0, 1) : order.filter((index) => values[index] > 0.5);
  find("scores").replaceChildren(...order.map((index) => bar(about.labels[index], values[index], { isMarked: predicted.includes(index) })));
  find("scores").dataset.values = JSON.stringify(values);
  const names = predicted.map((index) => `${about.labels[index]} (${percent(values[index])})`).join(", ");
  find("class-summary").textContent = `Prediction: ${names || "none"}.${note(isTruncated, about.length)}`;
}

function showScore({ values: [value], isTruncated }, texts, about) {
  find("scores").replaceChildren(bar("score", value.toPrecision(4), { share: 0 }));
  find("scores").dataset.values = JSON.stringify([value]);
  find("class-summary").textContent = `Score: ${value.toPrecision(4)}.${note(isTruncated, about.length)}`;
}

function showChoices({ choices, values, isTruncated }, texts, about) {
  const best = values.indexOf(Math.max(...values));
  find("scores-title").textContent = "Choices";
  find("scores").replaceChildren(...choices.map((choice, index) => bar(choice, values[index], { isMarked: index === best })));
  find("scores").dataset.values = JSON.stringify(values);
  const verdict = choices.length > 1 ? `Choice: ${choices[best]} (${percent(values[best])}).` : "Write at least two choices.";
  find("class-summary").textContent = verdict + note(isTruncated, about.length);
}

function showTags({ words, isTruncated }, texts, about) {
  const types = [...new Set(about.labels.map((label) => label.replace(/^[BILUSE]-/, "")))].filter((type) => type !== "O");
  const hue = (label) => types.indexOf(label.replace(/^[BILUSE]-/, ""));
  const counts = new Map();
  for (const { label } of words) counts.set(label, (counts.get(label) ?? 0) + 1);
  find("marked-caption").hidden = find("marked").hidden = false;
  find("marked-caption").textContent = "The tag of each word";
  find("scores-title").textContent = "Tags";
  find("marked").replaceChildren(
    ...words.map((word, index) =>
      element(
        "span",
        { class: hue(word.label) < 0 ? "word plain" : `word tag hue-${hue(word.label) % HUES}`, title: `${word.label}, ${percent(word.probability)}`, "data-label": word.label, "data-joined": index > 0 && word.start === words[index - 1].end },
        element("span", { class: "pieces" }, word.text),
        element("span", { class: "percent" }, word.label === "O" ? "" : word.label),
      ),
    ),
  );
  const order = [...counts].sort((a, b) => b[1] - a[1]);
  find("scores").replaceChildren(...order.map(([label, count]) => bar(label, String(count), { share: count / order[0][1] })));
  find("class-summary").textContent = note(isTruncated, about.length).trim();
}

function showAnswers({ answers, isAnswered, isTruncated }, [, context], about) {
  const [best] = answers;
  const isFound = best && isAnswered;
  find("marked-caption").hidden = find("marked").hidden = false;
  find("marked-caption").textContent = "Where it is in the text";
  find("scores-title").textContent = "Answers";
  find("marked").classList.add("prose");
  find("marked").replaceChildren(
    ...(isFound ? [context.slice(0, best.start), element("mark", {}, context.slice(best.start, best.end)), context.slice(best.end)] : [context]),
  );
  find("scores").replaceChildren(...answers.map((each) => bar(each.text, each.probability, { isMarked: isFound && each === best })));
  find("scores").dataset.values = JSON.stringify(answers.map((each) => each.probability));
  const verdict = isFound ? `Answer: ${best.text} (${percent(best.probability)}).` : "The text has no answer, says the model.";
  find("class-summary").textContent = verdict + note(isTruncated, about.length);
}
