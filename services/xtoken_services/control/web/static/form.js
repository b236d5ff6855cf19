// The form of a new run: of the loss only the settings of the chosen mode, and what is taken for empty fields.
"use strict";
{
  const DELAY_MS = 300;
  const form = document.getElementById("run-form");
  let timer = 0;
  let asking = false;
  let changed = false;

  /** Show the values that the run takes where the form is empty; one request at a time, as each reads the models. */
  async function showDefaults() {
    changed = true;
    if (asking) return;
    asking = true;
    try {
      while (changed) {
        changed = false;
        const response = await fetch("/runs/new/defaults", { method: "POST", body: new URLSearchParams(new FormData(form)) });
        if (response.ok && !changed) show(await response.json());
        const wait = Number(response.headers.get("Retry-After"));
        if (wait) later(1000 * wait);
      }
    } finally {
      asking = false;
    }
  }
  function show(taken) {
    for (const [name, text] of Object.entries(taken)) {
      const field = form.elements.namedItem(name);
      const automatic = field?.querySelector?.("[data-automatic]");
      if (automatic) automatic.textContent = `automatic: ${text}`;
      else if (field && "placeholder" in field) field.placeholder = text;
    }
  }
  function later(delay = DELAY_MS) {
    clearTimeout(timer);
    timer = setTimeout(() => showDefaults().catch(() => {}), delay);
  }
  if (form?.elements.namedItem("student.model")) {
    form.addEventListener("change", () => later());
    later();
  }

  const mode = document.querySelector("[name='loss.mode']");

  function showSettings() {
    for (const field of document.querySelectorAll("#part-loss [data-modes]")) {
      field.hidden = !field.dataset.modes.split(" ").includes(mode.value);
      for (const input of field.querySelectorAll("input, select, textarea")) input.disabled = field.hidden;
    }
  }
  mode?.addEventListener("change", showSettings);
  if (mode) showSettings();
}
