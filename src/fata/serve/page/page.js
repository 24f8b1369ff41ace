"use strict";

const COLOURS = ["#4054b2", "#d1782d", "#3a8f5c", "#b0413e", "#7a5ea8", "#8a6d3b", "#4a9fb5", "#888"];
const EVERY = 2000; // milliseconds between two updates
const element = (id) => document.getElementById(id);
const rows = new Map(); // by stream
let chosen = null;
let keepsImages = true;

async function ask(path, method = "GET") {
  const token = element("token").value;
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { method, headers });
  if (response.status === 204) return null;
  const content = await response.json();
  if (!response.ok) throw Object.assign(new Error(content.error), { status: response.status });
  return content;
}

function show(error) {
  const wrong = element("token").value ? "This token is not valid." : "Enter a token above.";
  element("error").hidden = !error;
  element("error").textContent = error ? (error.status === 401 ? wrong : error.message) : "";
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function ago(seconds) {
  if (!seconds) return "";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  if (past < 60) return `${Math.round(past)} s ago`;
  return past < 5400 ? `${Math.round(past / 60)} min ago` : `${Math.round(past / 3600)} h ago`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function row(name) {
  const line = document.createElement("tr");
  const button = document.createElement("button");
  button.textContent = name;
  button.addEventListener("click", () => choose(name));
  line.append(...[0, 1, 2, 3, 4, 5].map(() => document.createElement("td")));
  line.cells[0].append(button);
  rows.set(name, line);
  return line;
}

async function list() {
  const search = encodeURIComponent(element("search").value);
  const { streams, total } = await ask(`v1/streams?limit=1000&search=${search}`);
  const listed = streams.length < total ? `, the first ${streams.length.toLocaleString("en")} listed` : "";
  set(element("total"), `${total.toLocaleString("en")} stream${total === 1 ? "" : "s"}${listed}`);
  element("empty").hidden = total > 0;
  const names = new Set(streams.map((one) => one.stream));
  for (const [name, line] of rows) if (!names.has(name)) { line.remove(); rows.delete(name); }
  let before = null;
  for (const one of streams) {
    const line = rows.get(one.stream) || row(one.stream);
    const next = before ? before.nextSibling : element("streams").firstChild;
    if (line !== next) element("streams").insertBefore(line, next);
    before = line;
    line.setAttribute("aria-selected", one.stream === chosen);
    set(line.cells[1], one.images.toLocaleString("en"));
    set(line.cells[2], one.phase || "");
    set(line.cells[3], one.predicted_by || "");
    set(line.cells[4], one.health ? percent(one.health[one.predicted_by || "adapted"]) : "");
    set(line.cells[5], ago(one.last));
  }
}

function draw(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function drawClasses(points, names) {
  const totals = new Map();
  for (const point of points) {
    for (const [c, share] of Object.entries(point.classes)) totals.set(c, (totals.get(c) || 0) + share);
  }
  const top = [...totals].sort((a, b) => b[1] - a[1]).slice(0, COLOURS.length - 1).map(([c]) => c);
  const width = 600 / Math.max(points.length, 1);
  const bars = points.flatMap((point, number) => {
    let y = 160;
    const shares = top.map((c) => point.classes[c] || 0);
    shares.push(Math.max(0, 1 - shares.reduce((sum, share) => sum + share, 0)));
    return shares.map((share, rank) => {
      const height = 160 * share;
      y -= height;
      const fill = rank < top.length ? COLOURS[rank] : COLOURS.at(-1);
      return draw("rect", { x: number * width, y, width, height, fill });
    });
  });
  element("classes").replaceChildren(...bars);
  const legend = top.map((c, rank) => [names[c] || `class ${c}`, COLOURS[rank]]);
  legend.push(["others", COLOURS.at(-1)]);
  element("legend").replaceChildren(...legend.map(([text, fill]) => {
    const item = document.createElement("li");
    const mark = draw("svg", { viewBox: "0 0 1 1" });
    mark.append(draw("rect", { width: 1, height: 1, fill }));
    item.append(mark, ` ${text}`);
    return item;
  }));
}

// Shares as "x,y" over the time of all points; a single one goes from edge to edge.
function along(shares) {
  const last = Math.max(1, shares.length - 1);
  const places = shares.length === 1 ? [shares[0], shares[0]] : shares;
  return places.flatMap((share, number) =>
    (share === null ? [] : [`${(600 * number) / last},${118 - 116 * share}`])).join(" ");
}

function curve(shares, colour, dashed = false) {
  return draw("polyline", {
    points: along(shares), fill: "none", stroke: colour, "stroke-width": 2,
    ...(dashed ? { "stroke-dasharray": "6 4" } : {}),
  });
}

function drawCurves(points) {
  element("curves").replaceChildren(
    draw("polygon", { points: `0,118 ${along(points.map((p) => p.source))} 600,118`, fill: "#8884" }),
    curve(points.map((p) => p.confidence), COLOURS[0]),
    curve(points.map((p) => p.selected), COLOURS[1], true),
  );
}

function drawHealth(health, points) {
  set(element("health"), health ? `Without labels, as of the guard's last checks: adapted model ` +
    `${percent(health.adapted)} (line), source model ${percent(health.source)} (dashed); from 0 % at ` +
    "the bottom to 100 % at the top." : "None: the guard has not checked this stream, or it is off.");
  const shares = (model) => points.map((p) => (p.health ? p.health[model] : null));
  const known = points.some((p) => p.health);
  element("accuracy").toggleAttribute("hidden", !known);
  element("accuracy").replaceChildren(
    curve(shares("adapted"), COLOURS[0]), curve(shares("source"), COLOURS[1], true),
  );
}

function drawEvents(events) {
  element("guard").hidden = events.length === 0;
  element("quiet").hidden = events.length > 0;
  element("events").replaceChildren(...[...events].reverse().map((event) => {
    const line = document.createElement("tr");
    for (const text of [event.batch, event.action, event.odds.toFixed(1)]) {
      line.append(Object.assign(document.createElement("td"), { textContent: text }));
    }
    return line;
  }));
}

async function drawImages() {
  if (!keepsImages) return;
  try {
    const { images } = await ask(`v1/streams/${chosen}/images`);
    element("latest").hidden = false;
    element("images").replaceChildren(...images.reverse().map((one) => {
      const figure = document.createElement("figure");
      const picture = document.createElement("img");
      picture.src = `data:image/png;base64,${one.png}`;
      picture.alt = one.name || `class ${one.label}`;
      figure.append(picture, `${picture.alt} ${Math.round(100 * one.confidence)} %`);
      return figure;
    }));
  } catch (error) {
    if (error.status !== 404) throw error;
    keepsImages = false;
    element("latest").hidden = true;
  }
}

async function detail() {
  if (chosen === null) return;
  const name = chosen;
  const [stream, { points, names }] = await Promise.all([
    ask(`v1/streams/${name}`), ask(`v1/streams/${name}/history`),
  ]);
  if (name !== chosen) return; // another one was chosen meanwhile
  element("detail").hidden = false;
  set(element("name"), name);
  const { seen, stepped } = stream.counts;
  set(element("facts"), `${stream.method}, ${stream.frozen ? "frozen" : "not frozen"}, phase ` +
    `${stream.phase}; ${seen.toLocaleString("en")} images seen, ` +
    `${stepped.toLocaleString("en")} steps`);
  set(element("freeze"), stream.frozen ? "Unfreeze" : "Freeze");
  drawHealth(stream.health, points);
  drawClasses(points, names);
  drawCurves(points);
  drawEvents(stream.events);
  await drawImages();
}

function choose(name) {
  chosen = name;
  for (const [one, line] of rows) line.setAttribute("aria-selected", one === name);
  guarded(async () => {
    await detail();
    element("detail").scrollIntoView({ block: "nearest" });
  });
}

async function guarded(work) {
  try {
    await work();
    show(null);
  } catch (error) {
    show(error);
  }
}

async function act(action) {
  await ask(`v1/streams/${chosen}/${action}`, "POST");
  await detail();
}

async function update() {
  if (!document.hidden) {
    await guarded(async () => {
      await list();
      if (chosen !== null && !rows.has(chosen) && !element("search").value) {
        chosen = null;
        element("detail").hidden = true;
      }
      await detail();
    });
  }
  setTimeout(update, EVERY);
}

element("freeze").addEventListener("click", () =>
  guarded(() => act(element("freeze").textContent.toLowerCase())));
element("reset").addEventListener("click", () => {
  if (confirm(`Reset ${chosen} to the source weights?`)) guarded(() => act("reset"));
});
element("token").value = sessionStorage.getItem("token") || ""; // of this tab, until it is closed
element("token").addEventListener("input", () => sessionStorage.setItem("token", element("token").value));
for (const id of ["search", "token"]) element(id).addEventListener("input", () => guarded(list));
update();
