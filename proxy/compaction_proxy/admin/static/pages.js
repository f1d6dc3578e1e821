// Draws the charts from the figures beside them, and says what a slider stands at. Nothing here is needed to
// read a page: each chart has a table.
"use strict";
(() => {
  const HEIGHT_PX = 280;
  const THIN_PX = 9;
  const MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");
  const drawn = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function short(value) {
    if (value === null || value === undefined) return "";
    for (const [size, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return +(value / size).toFixed(value / size < 10 ? 2 : 1) + sign;
    }
    return String(Math.round(value));
  }

  // Times are UTC, as everywhere on the pages: a day at midnight, else the hour.
  function time(at, whole) {
    const date = new Date(at * 1000), day = `${date.getUTCDate()} ${MONTHS[date.getUTCMonth()]}`;
    const hour = String(date.getUTCHours()).padStart(2, "0") + ":00";
    return whole ? `${day} ${hour}` : date.getUTCHours() ? hour : day;
  }

  function hatched() {
    const tile = document.createElement("canvas");
    const side = tile.width = tile.height = Math.round(6 * devicePixelRatio);
    const brush = tile.getContext("2d");
    brush.fillStyle = colour("--cached");
    brush.fillRect(0, 0, side, side);
    brush.strokeStyle = colour("--accent");
    brush.lineWidth = devicePixelRatio;
    brush.beginPath();
    for (const at of [-side, 0, side]) { brush.moveTo(at, side); brush.lineTo(at + side, 0); }
    brush.stroke();
    return brush.createPattern(tile, "repeat");
  }

  function axes(date) {
    const shared = {
      stroke: colour("--quiet"), font: "12px " + colour("--text"),
      grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false },
    };
    return [
      { ...shared, grid: { show: false }, values: (_, at) => at.map((each) => (date ? time(each) : each % 1 ? "" : each)) },
      { ...shared, size: 52, values: (_, at) => at.map(short) },
    ];
  }

  // Compactions: a sign above the column, and the number of the round where it is known.
  function signs(rounds, numbered) {
    return (chart) => {
      const brush = chart.ctx, ratio = devicePixelRatio;
      brush.save();
      brush.fillStyle = colour("--ink");
      brush.textAlign = "center";
      brush.textBaseline = "alphabetic";
      brush.font = 11 * ratio + "px " + colour("--text");
      rounds.forEach((each, index) => {
        if (each === null || (!numbered && !each)) return;
        const x = chart.valToPos(chart.data[0][index], "x", true), y = chart.bbox.top - 4 * ratio;
        brush.beginPath();
        brush.moveTo(x - 4 * ratio, y - 6 * ratio);
        brush.lineTo(x + 4 * ratio, y - 6 * ratio);
        brush.lineTo(x, y);
        brush.fill();
        if (numbered ? each : each > 1) brush.fillText(String(each), x, y - 10 * ratio);
      });
      brush.restore();
    };
  }

  // A round leads to its page, from anywhere in its column.
  function leading(told, place) {
    if (!place.dataset.places) return [];
    const round = (chart) => chart.cursor.idx === null ? "" : told.places[chart.cursor.idx];
    return [(chart) => {
      chart.over.addEventListener("click", () => { if (round(chart)) location.assign(place.dataset.places + round(chart)); });
      chart.over.addEventListener("mousemove", () => chart.over.classList.toggle("pointing", !!round(chart)));
    }];
  }

  function columns(told, date, place) {
    const x = told.x, step = x.length > 1 ? Math.min(...x.slice(1).map((each, index) => each - x[index])) : (date ? 3600 : 1);
    const thin = (place.clientWidth / x.length) * 0.6 < THIN_PX;
    const bars = (share) => uPlot.paths.bars({ size: [share, 60], gap: 0 });
    const series = [
      { label: date ? "hour from" : "request", value: (_, at) => (at === null ? "" : date ? time(at, true) : at) },
      { label: "sent", paths: bars(0.86), fill: colour("--sent"), width: 0, points: { show: false }, value: (_, at) => short(at) },
      { label: "forwarded", paths: bars(0.6), fill: colour("--accent"), width: 0, points: { show: false }, value: (_, at) => short(at) },
      { label: "cached", paths: bars(0.6), fill: thin ? colour("--cached") : hatched(), width: 0, points: { show: false }, value: (_, at) => short(at) },
    ];
    const data = [x, told.sent, told.forwarded, told.cached.map((each) => each || null)];
    if (told.trigger && told.trigger.some((each) => each)) {
      const top = Math.max(0, ...told.sent, ...told.forwarded);
      // A trigger far above everything would leave the columns no height.
      if (Math.min(...told.trigger.filter((each) => each)) <= 3 * top) {
        series.push({ label: "trigger", stroke: colour("--ink"), dash: [6, 4], width: 1.5, points: { show: false }, value: (_, at) => short(at) });
        data.push(told.trigger);
      }
    }
    return [{
      series, axes: axes(date), padding: [26, 8, 0, 0],
      scales: {
        x: { time: date, range: (_, low, high) => [low - step * 0.7, high + step * 0.7] },
        y: { range: (_, __, high) => [0, (high || 1) * 1.05] },
      },
      hooks: { draw: [signs(told.rounds, !date)], ready: leading(told, place) },
    }, data];
  }

  function lines(told) {
    const series = [{ label: "request", value: (_, at) => at ?? "" }, { label: "never compacting", stroke: colour("--sent"), width: 2, fill: colour("--faint"), points: { show: false }, value: (_, at) => short(at) }];
    told.names.forEach((name, index) => series.push({
      label: name, stroke: index % 2 ? colour("--ink") : colour("--accent"), dash: told.dashes[index % told.dashes.length],
      width: 2, points: { show: false }, value: (_, at) => short(at),
    }));
    return [{
      series, axes: axes(false), padding: [12, 8, 0, 0],
      scales: { x: { time: false }, y: { range: (_, __, high) => [0, (high || 1) * 1.05] } },
    }, [told.x, told.sent, ...told.forwarded]];
  }

  function draw(place) {
    const told = JSON.parse(place.dataset.chart);
    drawn.get(place)?.destroy();
    if (!told.x.length) return;
    const [options, data] = told.kind === "strategies" ? lines(told) : columns(told, told.kind === "period", place);
    const chart = new uPlot({ width: place.clientWidth, height: HEIGHT_PX, cursor: { drag: { x: false, y: false } }, tzDate: (at) => uPlot.tzDate(new Date(at * 1000), "Etc/UTC"), ...options }, data, place);
    drawn.set(place, chart);
  }

  function drawAll() {
    for (const place of drawn.keys()) if (!place.isConnected) drawn.delete(place);
    document.querySelectorAll("[data-chart]").forEach(draw);
  }

  function said(slider) {
    const output = document.querySelector(`output[data-of="${slider.id}"]`);
    if (output) output.textContent = +slider.value ? (+slider.value).toLocaleString("en") : output.dataset.zero;
  }

  document.addEventListener("input", (event) => { if (event.target.type === "range") said(event.target); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    for (const [place, chart] of drawn) chart.setSize({ width: place.clientWidth, height: HEIGHT_PX });
  });
  // Not `scrollIntoView`, after which the tabulator key would go on from there.
  const pages = document.querySelector(".top nav"), here = pages?.querySelector("[aria-current]");
  if (here) pages.scrollLeft = here.offsetLeft + here.offsetWidth - pages.clientWidth;
  drawAll();
})();
