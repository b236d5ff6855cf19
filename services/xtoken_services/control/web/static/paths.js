// Suggestions for paths: a list below the field that is being edited, with files below the control plane's roots.
"use strict";
{
  const DELAY_MS = 120;
  let timer = 0;
  let open = null; // { field, list, active }

  const isPath = (element) => element?.matches?.("[data-paths]");

  function close() {
    if (!open) return;
    open.list.remove();
    open.field.setAttribute("aria-expanded", "false");
    open.field.removeAttribute("aria-activedescendant");
    open = null;
  }

  async function suggest(field) {
    const text = field.value.trim();
    const response = await fetch(`/paths?kind=${field.dataset.paths}&text=${encodeURIComponent(text)}`, { headers: { Accept: "application/json" } });
    if (!response.ok || document.activeElement !== field) return;
    const paths = (await response.json()).filter((path) => path !== text);
    close();
    if (!paths.length) return;
    const list = document.createElement("ul");
    list.className = "path-list";
    list.id = `${field.id}-paths`;
    list.setAttribute("role", "listbox");
    list.append(...paths.map((path, index) => {
      const item = document.createElement("li");
      Object.assign(item, { id: `${list.id}-${index}`, role: "option", textContent: path });
      item.dataset.path = path;
      return item;
    }));
    list.style.top = `${field.offsetTop + field.offsetHeight + 4}px`;
    field.after(list);
    field.setAttribute("aria-expanded", "true");
    field.setAttribute("aria-controls", list.id);
    open = { field, list, active: -1 };
  }

  function choose(path) {
    const { field } = open;
    field.value = path;
    close();
    field.dispatchEvent(new Event("change", { bubbles: true })); // a browser fires none for text set by a script
    if (path.endsWith("/")) suggest(field);
  }

  function move(by) {
    const items = [...open.list.children];
    open.active = (open.active + by + items.length) % items.length;
    items.forEach((item, index) => item.setAttribute("aria-selected", String(index === open.active)));
    items[open.active].scrollIntoView({ block: "nearest" });
    open.field.setAttribute("aria-activedescendant", items[open.active].id);
  }

  const later = (field) => {
    clearTimeout(timer);
    timer = setTimeout(() => suggest(field), DELAY_MS);
  };
  document.addEventListener("input", (event) => { if (isPath(event.target)) later(event.target); });
  document.addEventListener("focusin", (event) => { if (isPath(event.target)) later(event.target); });
  document.addEventListener("focusout", (event) => { if (event.target === open?.field) close(); });
  document.addEventListener("pointerdown", (event) => {
    const item = event.target.closest?.(".path-list li");
    if (!item || !open) return;
    event.preventDefault(); // keeps the focus in the field
    choose(item.dataset.path);
  });
  document.addEventListener("keydown", (event) => {
    if (!open || event.target !== open.field) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) move(step);
    else if (event.key === "Enter" && open.active >= 0) choose(open.list.children[open.active].dataset.path);
    else if (event.key === "Escape") close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }, true);
}
