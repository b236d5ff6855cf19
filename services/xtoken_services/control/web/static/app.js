// Behaviour beside htmx: one timer for all updates, colours, confirmations, copying.
"use strict";

const TIMER_MS = 500;
let last = 0;
let busy = 0;

/** Fire an update at the interval that the page sets, while it is visible. */
function tick() {
  const every = 1000 * Number(document.querySelector("[data-every]")?.dataset.every ?? 5);
  if (!document.hidden && busy === 0 && performance.now() - last >= every - TIMER_MS / 2) {
    last = performance.now();
    document.body.dispatchEvent(new CustomEvent("tick"));
  }
}
setInterval(tick, TIMER_MS);
document.addEventListener("visibilitychange", tick);
document.body.addEventListener("htmx:beforeRequest", () => { busy += 1; });
document.body.addEventListener("htmx:afterRequest", (event) => {
  busy = Math.max(0, busy - 1);
  document.getElementById("unreachable").hidden = Boolean(event.detail.xhr?.status);
});

// Morphing keeps opened details and focused fields.
Idiomorph.defaults.ignoreActiveValue = true;
Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) => !(name === "open" && node.tagName === "DETAILS");

const THEMES = ["", "light", "dark"];
const THEME_NAMES = { "": "system", light: "light", dark: "dark" };

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "";
  const button = document.getElementById("theme");
  button.dataset.theme = theme;
  button.title = `Colours: ${THEME_NAMES[theme]}`;
  button.setAttribute("aria-label", button.title);
}
document.getElementById("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("theme", next);
  showTheme();
  document.dispatchEvent(new CustomEvent("colours"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new CustomEvent("colours")));
showTheme();

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-confirm], [data-copy]");
  if (button?.dataset.confirm && !confirm(button.dataset.confirm)) event.preventDefault();
  if (button?.dataset.copy) copy(button);
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    if (!menu.contains(event.target)) menu.open = false;
  }
});
document.addEventListener("keydown", (event) => {
  const menu = event.key === "Escape" && document.querySelector("details.menu[open]");
  if (menu) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
});

/** Copy a text; select it where pages have no access to the clipboard. */
async function copy(button) {
  const text = document.querySelector(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(text.textContent);
    const label = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  } catch {
    getSelection().selectAllChildren(text);
  }
}

// A form is submitted once; its button shows that it is busy.
document.addEventListener("submit", (event) => {
  if (event.target.hasAttribute("hx-post")) return;
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "true";
  if (event.submitter?.dataset.busy) event.submitter.textContent = event.submitter.dataset.busy;
});
addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});

// Keep a log scrolled to its end, unless the reader has scrolled up.
let followed = true;
const atEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 24;
const toEnd = () => { const log = document.getElementById("log"); if (log && followed) log.scrollTop = log.scrollHeight; };
document.addEventListener("scroll", (event) => { if (event.target.id === "log") followed = atEnd(event.target); }, true);
document.body.addEventListener("htmx:afterSettle", toEnd);
toEnd();

// Focus the first invalid field.
const invalid = document.querySelector('[aria-invalid="true"]');
invalid?.focus({ preventScroll: true });
document.querySelector("form #errors")?.scrollIntoView({ block: "center" });  // documents have headings of this name
if (invalid?.id !== "toml") invalid?.closest(".field")?.scrollIntoView({ block: "nearest" });

// Runs that are selected for a comparison stay selected when the list is updated.
const MOST_COMPARED = 6;
const selected = new Set();
function showSelected() {
  for (const box of document.querySelectorAll("#choose [type=checkbox]")) {
    box.checked = selected.has(box.value);
    box.disabled = !box.checked && selected.size >= MOST_COMPARED;
  }
  const bar = document.getElementById("choosing");
  if (bar) bar.hidden = selected.size < 2;
}
document.addEventListener("change", (event) => {
  if (!event.target.matches("#choose [type=checkbox]")) return;
  if (event.target.checked) selected.add(event.target.value);
  else selected.delete(event.target.value);
  showSelected();
});
document.body.addEventListener("htmx:afterSettle", showSelected);
for (const box of document.querySelectorAll("#choose :checked")) selected.add(box.value);
showSelected();

// Link a chunk on both sides while the pointer is on one of its tokens.
document.addEventListener("pointerover", (event) => {
  const over = event.target.closest?.(".aligned .token");
  if (!over) return;
  const same = (token) => over.dataset.chunk !== "-1" && token.dataset.chunk === over.dataset.chunk;
  const sides = [...document.querySelectorAll(".aligned")].map((side) => [...side.querySelectorAll(".token")].filter(same));
  for (const token of document.querySelectorAll(".aligned .token")) token.classList.toggle("pointed", token === over || same(token));
  const texts = sides.map((tokens) => tokens.map((token) => token.textContent).join(" | "));
  const linked = `${texts[0]}  ↔  ${texts[1]}  (${sides[0].length} to ${sides[1].length})`;
  document.getElementById("pointed-at").textContent = over.dataset.chunk === "-1" ? `${over.textContent}  is not aligned` : linked;
});
