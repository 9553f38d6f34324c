// Words of a text with their tokens. The tokenizer gives no offsets: words are found here, encoded one by one, and
// compared with the encoding of the whole text.
import { Tokenizer } from "./vendor/tokenizers.min.mjs";

const SPACE = "\\t\\n\\r\\p{Z}"; // BERT's normalizer removes other control characters, so that they separate no words
const PUNCTUATION = "\\p{P}\\u0021-\\u002F\\u003A-\\u0040\\u005B-\\u0060\\u007B-\\u007E";
const CHINESE = "\\u{4E00}-\\u{9FFF}\\u{3400}-\\u{4DBF}\\u{20000}-\\u{2A6DF}\\u{2A700}-\\u{2CEAF}\\u{F900}-\\u{FAFF}\\u{2F800}-\\u{2FA1F}";
const BYTE_LEVEL = /\s*\S+|\s+$/gu; // a word with the space before it, and the space at the end
const ABOVE_FFFF = /[\u{20000}-\u{2A6DF}\u{2A700}-\u{2CEAF}\u{2F800}-\u{2FA1F}]/gu;
const PREFIX = "##";

const escape = (text) => text.replace(/[\\^$.*+?()[\]{}|/-]/g, "\\$&");
const equal = (a, b) => a.length === b.length && a.every((value, index) => value === b[index]);

export class Words {
  /** `tokenizer` and `settings`: the content of tokenizer.json and tokenizer_config.json. */
  constructor(tokenizer, settings, specialTokens) {
    this.tokenizer = new Tokenizer(tokenizer, settings);
    const normalize = this.tokenizer.normalizer ?? ((text) => text);
    this.isSplittingChinese = normalize("一") === " 一 ";
    this.isLowercase = normalize("Σ") === "σ";
    const chinese = this.isSplittingChinese ? CHINESE : "";
    const bert = `[${chinese}]|[^${SPACE}${PUNCTUATION}${chinese}]+|[${PUNCTUATION}]`;
    const special = Object.values(specialTokens).map(escape).join("|");
    const added = tokenizer.added_tokens.filter((token) => !token.special);
    const kind = (tokenizer, pattern) => ({ tokenizer, patterns: [new RegExp(pattern, "gu"), BYTE_LEVEL], cache: new Map() });
    this.kinds = {
      text: kind(this.tokenizer, `${special}|${bert}`),
      plain: kind(new Tokenizer({ ...tokenizer, added_tokens: added }, settings), bert), // as in fine-tuning: special tokens are text
    };
  }

  /** {ids, words}: token ids without [CLS] and [SEP]; each word with its place in the text and among the ids. Places are
   * null where the words that are found here have other ids than the text. */
  split(text, kind = "text") {
    const whole = this.encode(text, kind);
    for (const pattern of this.kinds[kind].patterns) {
      const result = this.splitBy(text, pattern, kind);
      if (equal(result.ids, whole)) return result;
    }
    return { ids: whole, words: whole.map((id, index) => this.word(this.name(id), null, null, index, [id])) };
  }

  splitBy(text, pattern, kind) {
    const { cache } = this.kinds[kind];
    const ids = [];
    const words = [];
    for (const match of text.matchAll(pattern)) {
      const space = Math.max(0, match[0].search(/\S/u));
      if (!cache.has(match[0])) cache.set(match[0], this.encode(match[0], kind));
      const encoded = cache.get(match[0]);
      const [start, end] = [match.index + space, match.index + match[0].length];
      if (encoded.length) words.push(this.word(text.slice(start, end), start, end, ids.length, encoded));
      ids.push(...encoded);
    }
    if (cache.size > 20000) cache.clear();
    return { ids, words };
  }

  encode(text, kind = "text") {
    if (this.isSplittingChinese) text = text.replace(ABOVE_FFFF, " $& "); // the library does not separate them
    if (this.isLowercase) text = text.replaceAll("Σ", "σ"); // the library writes ς at the end of a word, Python does not
    return this.kinds[kind].tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  name(id) {
    return this.tokenizer.id_to_token(id) ?? `<${id}>`;
  }

  /** A word with its tokens, each with its part of the text; a part is the whole word where lengths do not match. */
  word(text, start, end, first, ids) {
    const names = ids.map((id) => this.name(id));
    const characters = [...text];
    const lengths = names.map((name) => [...(name.startsWith(PREFIX) && text !== name ? name.slice(2) : name)].length);
    const isAligned = names.length > 1 && lengths.reduce((sum, each) => sum + each, 0) === characters.length;
    let at = 0;
    const tokens = ids.map((id, index) => {
      const part = characters.slice(at, at + lengths[index]).join("");
      const before = characters.slice(0, at).join("").length;
      at += lengths[index];
      const place = isAligned ? [start + before, start + before + part.length] : [start, end];
      return { id, name: names[index], text: isAligned ? part : text, start: place[0], end: place[1] };
    });
    return { text, start, end, first, tokens, isAligned };
  }

  /** Whether a token starts a word, so that it can take the place of one. */
  startsWord(name) {
    if (/^\[.*\]$|^<.*>$/.test(name) || name === "") return false;
    return this.isWordPiece ? !name.startsWith(PREFIX) : /^[Ġ▁]/.test(name);
  }

  get isWordPiece() {
    return this.tokenizer.pre_tokenizer?.config?.type !== "ByteLevel" && !this.hasSpaceMarks;
  }

  get hasSpaceMarks() {
    this.spaceMarks ??= [...this.tokenizer.get_vocab().keys()].some((name) => /^[Ġ▁]./.test(name));
    return this.spaceMarks;
  }

  /** A token as text. */
  textOf(name) {
    return name.replace(/^[Ġ▁]/, "");
  }
}
