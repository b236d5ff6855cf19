// What htmx leaves to do: one clock for everything that is brought up to date, colours, confirmations, copying.
"use strict";

const UNSEEN_MS = 500;
let last = 0;
let busy = 0;

/** Ask for news as often as the page says, while somebody looks at it. */
function tick() {
  const every = 1000 * Number(document.querySelector("[data-every]")?.dataset.every ?? 5);
  if (!document.hidden && busy === 0 && performance.now() - last >= every - UNSEEN_MS / 2) {
    last = performance.now();
    document.body.dispatchEvent(new CustomEvent("tick"));
  }
}
setInterval(tick, UNSEEN_MS);
document.addEventListener("visibilitychange", tick);
document.body.addEventListener("htmx:beforeRequest", () => { busy += 1; });
document.body.addEventListener("htmx:afterRequest", (event) => {
  busy = Math.max(0, busy - 1);
  document.getElementById("unreachable").hidden = Boolean(event.detail.xhr?.status);
});

// Morphing leaves alone what the reader has opened or is typing.
Idiomorph.defaults.ignoreActiveValue = true;
Idiomorph.defaults.callbacks.beforeAttributeUpdated = (name, node) => !(name === "open" && node.tagName === "DETAILS");

const THEMES = ["", "light", "dark"];
const THEME_NAMES = { "": "as the system has them", light: "light", dark: "dark" };

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

/** Copy a text; selecting it is what remains where pages may not write to the clipboard. */
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

// A form is sent once, and its button says what is done meanwhile.
document.addEventListener("submit", (event) => {
  if (event.target.hasAttribute("hx-post")) return;
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "true";
  if (event.submitter?.dataset.busy) event.submitter.textContent = event.submitter.dataset.busy;
});
addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});

// A log stays at its end, unless the reader has scrolled up.
let followed = true;
const atEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 24;
const toEnd = () => { const log = document.getElementById("log"); if (log && followed) log.scrollTop = log.scrollHeight; };
document.addEventListener("scroll", (event) => { if (event.target.id === "log") followed = atEnd(event.target); }, true);
document.body.addEventListener("htmx:afterSettle", toEnd);
toEnd();

// The first field with a complaint is where to go on.
const complained = document.querySelector('[aria-invalid="true"]');
complained?.focus({ preventScroll: true });
document.getElementById("errors")?.scrollIntoView({ block: "center" });
if (complained?.id !== "toml") complained?.closest(".field")?.scrollIntoView({ block: "nearest" });

// A chunk is shown on both sides when its token is pointed at.
document.addEventListener("pointerover", (event) => {
  const chunk = event.target.closest?.(".aligned .token")?.dataset.chunk;
  for (const token of document.querySelectorAll(".aligned .token")) {
    token.classList.toggle("pointed", chunk !== undefined && chunk !== "-1" && token.dataset.chunk === chunk);
  }
});
