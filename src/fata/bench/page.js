"use strict";

const chosen = name =>
  new Set([...document.querySelectorAll(`input[name=${name}]:checked`)].map(box => box.value));

// Only what is chosen: sections by model and scenario, rows and lines by method.
function show() {
  const models = chosen("model"), scenarios = chosen("scenario"), methods = chosen("method");
  for (const section of document.querySelectorAll("section[data-model]")) {
    section.hidden = !(models.has(section.dataset.model) && scenarios.has(section.dataset.scenario));
  }
  for (const row of document.querySelectorAll("tr[data-method]")) {
    row.hidden = !methods.has(row.dataset.method);
  }
  draw();
}

// Figures are drawn when they are seen: a page may hold hundreds.
function draw() {
  const methods = chosen("method");
  for (const section of document.querySelectorAll("section[data-model]:not([hidden])")) {
    const domain = section.querySelector("select.domain").value;
    for (const plot of section.querySelectorAll("details[open] .plot")) {
      const figure = JSON.parse(document.getElementById(plot.dataset.from).textContent);
      const data = figure.data.filter(trace =>
        methods.has(trace.name.split(",")[0].split(" ")[0]) &&
        (trace.meta === undefined || trace.meta === domain));
      Plotly.react(plot, data, figure.layout, {responsive: true, displayModeBar: false});
    }
  }
}

document.addEventListener("change", show);
for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", draw);
show();
