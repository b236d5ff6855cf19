// A new run: the form writes its settings into the text of the run file, which alone is sent, and shows those in it.
"use strict";
{
  const editor = document.getElementById("toml");
  const lines = document.getElementById("lines");
  const form = document.getElementById("fields");
  const fields = [...form.querySelectorAll("[data-setting]")];
  const errors = [...document.querySelectorAll("[data-error]")];
  const LEAST_ROWS = 16;
  // Tables whose short form, as in `student = "DIRECTORY"`, names one setting.
  const SHORT = { student: "model", "teacher.0": "model", data: "path" };
  const TOKEN = /"""[^]*?"""|'''[^]*?'''|"(?:\\.|[^"\\\n])*"|'[^'\n]*'|#.*|\n|[^"'#\n[\]{}]+|[^]/y;
  const NUMBER = /^[+-]?\d+(\.\d+)?(e[+-]?\d+)?$/i;

  /**
   * Find the statements of a TOML text by the names of their tables and settings, as errors name them.
   * It only finds places: the server parses the text, and reports what is wrong with it.
   * A table has its first `line` and the place `next` of one more setting; a setting also `start` to `next`, all of its
   * lines, and `from` to `to`, its value.
   */
  function statements(toml) {
    const found = new Map([["", { line: 0, next: 0 }]]);
    const items = new Map([["teacher", 0]]); // number of the current item of every list of tables; one teacher needs no list
    const lists = new Set();
    const place = (path, above) => path.split(".").reduce((name, part) => {
      const full = [name, part.trim().replace(/^["']|["']$/g, "")].filter(Boolean).join(".");
      return items.has(full) ? `${full}.${items.get(full)}` : full;
    }, above);
    let table = "";
    for (let at = 0, line = 1; at < toml.length;) {
      const start = at;
      const first = line;
      let to = at;
      // A statement ends at the first line end outside of brackets and texts.
      for (let depth = 0, token = ""; at < toml.length && !(token === "\n" && depth <= 0);) {
        TOKEN.lastIndex = at;
        [token] = TOKEN.exec(toml);
        at += token.length;
        line += token.split("\n").length - 1;
        depth += "[{".includes(token) - "]}".includes(token);
        if (token[0] !== "#" && token.trim()) to = at - token.length + token.trimEnd().length;
      }
      const text = toml.slice(start, to);
      const header = /^\s*(\[\[?)([^[\]]+)\]/.exec(text);
      const key = /^\s*([^=[\]{}#]+?)\s*=\s*/.exec(text);
      if (header) {
        const list = place(header[2], "").replace(/\.\d+$/, "");
        if (header[1] === "[[") items.set(list, lists.has(list) ? items.get(list) + 1 : 0);
        if (header[1] === "[[") lists.add(list);
        table = place(header[2], "");
        found.set(table, { line: first, next: at });
      } else if (key) {
        const name = place(key[1], table);
        const from = start + key[0].length;
        const short = !table && SHORT[name] && /["']/.test(toml[from]);
        found.set(short ? `${name}.${SHORT[name]}` : name, { line: first, start, next: at, from, to, short, dotted: !table && name.includes(".") });
        found.get(table).next = at;
      }
    }
    return found;
  }

  /** Return what the text has of a setting: its statement, or the nearest one around it. */
  function around(found, name) {
    for (let above = name; above; above = above.includes(".") ? above.replace(/\.[^.]*$/, "") : "") {
      if (found.has(above)) return found.get(above);
    }
    return undefined;
  }

  /** Return a value as a field shows it; undefined for lists, tables and texts of several lines. */
  function plain(value) {
    if (/^'(?!'')/.test(value)) return value.slice(1, -1);
    if (!/^"(?!"")/.test(value)) return /^[\w.+-]+$/.test(value) ? value : undefined;
    try {
      return JSON.parse(value);
    } catch {
      return undefined; // an escape that JSON lacks
    }
  }

  /** Show the text's settings in the form, its lines, and which of them are wrong. */
  function show() {
    const toml = editor.value;
    const found = statements(toml);
    for (const field of fields) {
      const own = around(found, field.dataset.setting);
      const value = own?.from === undefined ? "" : found.get(field.dataset.setting) === own ? plain(toml.slice(own.from, own.to)) : undefined;
      field.disabled = value === undefined;
      const empty = field.disabled ? `in line ${own.line}` : field.dataset.empty;
      if (field.options) field.options[0].text = empty;
      else field.placeholder = empty;
      if (field !== document.activeElement) field.value = value ?? "";
    }
    const wrong = new Set(errors.map((error) => {
      const line = Number(/\(at line (\d+)/.exec(error.textContent)?.[1] ?? around(found, error.dataset.error)?.line ?? 0);
      const button = error.querySelector("button");
      button.textContent = `Line ${line}`;
      button.hidden = !line;
      button.value = line;
      return line;
    }));
    const numbers = toml.split("\n").map((_, index) => {
      const number = document.createElement(wrong.has(index + 1) ? "b" : "span");
      number.textContent = `${index + 1}\n`;
      return number;
    });
    lines.replaceChildren(...numbers);
    editor.rows = Math.max(numbers.length, LEAST_ROWS);
  }

  /** Write the value of a field into the text, or remove an empty one, and leave everything else as it is. */
  function write(field) {
    const [, table, key] = /^(?:(.*)\.)?(.*)$/.exec(field.dataset.setting).map((part) => part ?? "");
    const value = field.inputMode && NUMBER.test(field.value) ? field.value : JSON.stringify(field.value);
    const found = statements(editor.value);
    const own = found.get(field.dataset.setting);
    const short = found.get(`${table}.${SHORT[table]}`);
    const header = table === "teacher.0" ? "[[teacher]]" : `[${table}]`;
    const added = `${key} = ${value}\n`;
    const dotted = [...found].find(([name, statement]) => name.startsWith(`${table}.`) && statement.dotted)?.[1];
    if (own) {
      if (field.value) editor.setRangeText(value, own.from, own.to);
      else editor.setRangeText("", own.start, own.next);
    } else if (field.value && short?.short) {
      const model = `${SHORT[table]} = ${editor.value.slice(short.from, short.to)}\n`;
      editor.setRangeText("", short.start, short.next);
      append(`${header}\n${model}${added}`);
    } else if (field.value && found.has(table)) {
      const at = found.get(table).next;
      editor.setRangeText((at && editor.value[at - 1] !== "\n" ? "\n" : "") + added, at, at);
    } else if (field.value && dotted) { // TOML forbids a header for a table of dotted keys
      editor.setRangeText(`${table.replace(".0", "")}.${added}`, dotted.next, dotted.next);
    } else if (field.value) {
      append(`${header}\n${added}`);
    }
    show();
  }

  function append(text) {
    editor.value = `${editor.value.trimEnd()}\n\n${text}`.trimStart();
  }

  for (const field of fields) field.dataset.empty = field.options?.[0].text ?? field.placeholder;
  // A field that is emptied while its value is typed anew keeps its line.
  form.addEventListener("input", (event) => { if (event.target.value) write(event.target); });
  form.addEventListener("change", (event) => write(event.target));
  editor.addEventListener("input", show);
  addEventListener("pageshow", show); // a browser may restore the text
  document.getElementById("errors")?.addEventListener("click", (event) => {
    const line = Number(event.target.value ?? 0);
    if (!line) return;
    const start = editor.value.split("\n").slice(0, line - 1).join("\n").length + (line > 1);
    editor.focus({ preventScroll: true });
    editor.setSelectionRange(start, start + editor.value.slice(start).split("\n")[0].length);
    lines.children[line - 1]?.scrollIntoView({ block: "center" });
  });
  show();
}
