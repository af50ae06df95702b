"use strict";
// Draws the charts in the page's colours, and again in the other theme's when it changes.
const root = document.documentElement;
const darkPreferred = window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : darkPreferred.matches;
}

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

function draw(id) {
  const source = document.getElementById(id + "-data");
  if (!source) return;
  const figure = JSON.parse(source.textContent);
  const layout = figure.layout;
  layout.font = { ...layout.font, color: colour("--text"), family: getComputedStyle(document.body).fontFamily };
  layout.hoverlabel = { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text") } };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis\d*$/.test(key)) Object.assign(layout[key], { gridcolor: colour("--line"), linecolor: colour("--line") });
  }
  Plotly.react(id, figure.data, layout, { responsive: true, displaylogo: false, displayModeBar: false });
}

function drawAll() {
  ["steps", "losses"].forEach(draw);
}

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  drawAll();
});
darkPreferred.addEventListener("change", drawAll);
drawAll();
