"use strict";
// Draws every chart that the page describes, and again when the reader's colours change.
const told = JSON.parse(document.getElementById("numbers").textContent);
let drawn = [];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function shown(value) {
  if (value === null || value === undefined) return "-";
  return value.toLocaleString("en", { maximumSignificantDigits: 6 });
}

function series(one, index) {
  return {
    label: one.label,
    stroke: colour(["--one", "--two", "--three"][index]),
    width: 1.5,
    spanGaps: true,
    points: { show: one.points, size: 6 },
    value: (_, value) => shown(value),
  };
}

function draw() {
  drawn.forEach((chart) => chart.destroy());
  const axis = { stroke: colour("--text"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
  drawn = told.charts.map((chart) => {
    const place = document.getElementById(chart.id);
    const options = {
      width: place.clientWidth,
      height: 260,
      cursor: { sync: { key: "step" } },
      scales: { x: { time: false }, y: { distr: chart.log ? 3 : 1 } },
      axes: [{ ...axis, label: "step" }, { ...axis, size: 80, label: chart.unit }],
      series: [{ label: "step" }, ...chart.series.map(series)],
    };
    return new uPlot(options, [told.steps, ...chart.series.map((one) => one.values)], place);
  });
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", draw);
