// The form of a new run: of the loss only the settings of the chosen mode, and what is taken for empty fields.
"use strict";
{
  const DELAY_MS = 300;
  const form = document.getElementById("run-form");
  let timer = 0;
  let asked = 0;

  /** Show the values that the run takes where the form is empty; an older answer must not replace a newer one. */
  async function showDefaults() {
    const number = ++asked;
    const response = await fetch("/runs/new/defaults", { method: "POST", body: new URLSearchParams(new FormData(form)) });
    if (!response.ok || number !== asked) return;
    for (const [name, text] of Object.entries(await response.json())) {
      const field = form.elements.namedItem(name);
      const automatic = field?.querySelector?.("[data-automatic]");
      if (automatic) automatic.textContent = `automatic: ${text}`;
      else if (field && "placeholder" in field) field.placeholder = text;
    }
  }
  function later() {
    clearTimeout(timer);
    timer = setTimeout(() => showDefaults().catch(() => {}), DELAY_MS);
  }
  if (form?.elements.namedItem("student.model")) {
    form.addEventListener("change", later);
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
