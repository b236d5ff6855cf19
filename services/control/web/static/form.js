// The form of a new run: of the loss only the settings of the chosen mode.
"use strict";
{
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
