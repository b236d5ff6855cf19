// The API reference: Swagger UI over /openapi.json, in the colours of the other pages.
"use strict";
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, docExpansion: "list", validatorUrl: null });

function showColours() {
  const theme = document.documentElement.dataset.theme;
  const dark = theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark-mode", dark);
}
document.addEventListener("colours", showColours);
showColours();
