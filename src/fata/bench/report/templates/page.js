"use strict";

const chosen = name =>
  new Set([...document.querySelectorAll(`input[name=${name}]:checked`)].map(box => box.value));

// Only what is chosen: sections by model and scenario; rows, boxes and lines by method.
function show() {
  const models = chosen("model"), scenarios = chosen("scenario"), methods = chosen("method");
  for (const section of document.querySelectorAll("section[data-model]")) {
    section.hidden = !(models.has(section.dataset.model) && scenarios.has(section.dataset.scenario));
  }
  for (const part of document.querySelectorAll("[data-method]")) {
    part.hidden = !methods.has(part.dataset.method);
  }
  draw();
}

const axis = {gridcolor: "#e6e9ef", zerolinecolor: "#e6e9ef", linecolor: "#9aa3b2", automargin: true};
const base = {
  margin: {l: 45, r: 12, t: 26, b: 40}, font: {size: 12, color: "#1c2330"}, showlegend: false,
  legend: {orientation: "h", x: 0, y: 1, yanchor: "bottom"},
  hovermode: "closest", hoverlabel: {namelength: -1},
};
const every = new Set([...document.querySelectorAll("input[name=method]")].map(box => box.value));
const read = {};  // figures that were looked at
const figure = plot => read[plot.dataset.from] ??=
  JSON.parse(document.getElementById(plot.dataset.from).textContent);

// Plotly reads a name as markup: show it as it is.
const plain = text => String(text).replace(/[&<>]/g, sign => `&#${sign.charCodeAt(0)};`);

// A line's band lies below it: an outline there and back, filled.
function banded(trace) {
  if (!trace.band) return [trace];
  const at = sign => trace.y.map((y, i) => y === null ? null : y + sign * trace.band[i]);
  const outline = {
    x: [...trace.x, ...[...trace.x].reverse()], y: [...at(1), ...at(-1).reverse()], name: trace.name,
    mode: "lines", line: {width: 0}, fill: "toself", fillcolor: trace.line.color, opacity: .15,
    hoverinfo: "skip", showlegend: false,
  };
  return [outline, trace];
}

// An axis that shows `least` units at least, so that noise does not fill it.
function range(traces, least) {
  const shown = trace => trace.y.flatMap((y, i) => y === null ? [] :
    [y - (trace.band?.[i] ?? 0), y + (trace.band?.[i] ?? 0)]);
  const ys = traces.flatMap(shown);
  if (!least || !ys.length) return {};
  const low = Math.min(...ys), high = Math.max(...ys), more = Math.max(0, least - (high - low)) / 2;
  const edge = (high - low + 2 * more) * .04;
  return {range: [low - more - edge, high + more + edge]};
}

function react(plot, traces, layout, x) {
  const named = traces.map(trace => ({
    x, ...trace, name: plain(trace.name), ...(trace.text && {text: trace.text.map(plain)}),
  }));
  const drawn = named.flatMap(banded), y = {...layout.yaxis, ...range(named, layout.yaxis?.least)};
  const both = {xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...y}};
  Plotly.react(plot, drawn, {...base, ...layout, ...both}, {responsive: true, displayModeBar: false});
}

// Figures are drawn when they are seen: a page may hold hundreds.
function draw() {
  const methods = chosen("method");
  const gone = name => every.has(name.split(" ")[0]) && !methods.has(name.split(" ")[0]);
  for (const section of document.querySelectorAll("section[data-model]:not([hidden])")) {
    const boxes = [...section.querySelectorAll(".legend input:not(:checked)")];
    const off = new Set(boxes.map(box => box.value));
    for (const plot of section.querySelectorAll("details[open] .plot")) {
      const own = plot.parentElement.querySelector("select") ?? section.querySelector("select");
      const {data, layout, x} = figure(plot);
      const drawn = data.filter(trace =>
        !gone(trace.name) && (layout.showlegend || !off.has(trace.name)) &&
        (trace.meta === undefined || trace.meta === own.value));
      react(plot, drawn, layout, x);
    }
  }
}

// The drawing library is packed: unpacked once, before the first figure.
async function unpack() {
  const text = atob(document.getElementById("plotly").textContent);
  const packed = Uint8Array.from(text, sign => sign.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

unpack().then(() => {
  document.addEventListener("change", show);
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", draw);
  for (const plot of document.querySelectorAll(".story .plot")) {
    const {data, layout, x} = figure(plot);
    react(plot, data, layout, x);
  }
  show();
  document.body.dataset.ready = "yes";
});
