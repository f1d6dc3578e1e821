// Shows local times, refreshes live parts of a page, loads results in place, draws charts, and shows the
// values of sliders. Every page also works without this script: each chart has a table.
"use strict";
(() => {
  const HEIGHT_PX = { large: 280, small: 190 };
  // With more columns than this, a chart shows areas: bars would be hairlines.
  const MAX_BARS = 90;
  // Smallest distances between two marks of compactions, and between two of their numbers.
  const MARK_PX = 9, NUMBER_PX = 18;
  const COLOURS = { sent: "--sent", forwarded: "--accent", cached: "--cached", trigger: "--ink", failed: "--bad", waiting: "--ink" };
  const DAY_S = 86_400;
  const charts = new Map();

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Times

  function format(date, options, zone) {
    return new Intl.DateTimeFormat("en-GB", { ...options, timeZone: zone }).format(date).replace(",", "");
  }

  function ago(date) {
    const age = Math.max(0, (Date.now() - date) / 1000);
    for (const [size, unit] of [[DAY_S, "d"], [3600, "h"], [60, "min"]]) {
      if (age >= size) return `${Math.round(age / size)} ${unit} ago`;
    }
    return `${Math.round(age)} s ago`;
  }

  function showTimes(root = document) {
    for (const each of all("time[datetime]", root)) {
      const date = new Date(each.dateTime);
      if (isNaN(date)) continue;
      const whole = { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit" };
      if (date.getFullYear() !== new Date().getFullYear()) whole.year = "numeric";
      const local = format(date, whole);
      each.title = `${local} local time, ${each.dateTime}`;
      each.textContent = "ago" in each.dataset ? ago(date) : local;
    }
  }

  function showAges() {
    for (const each of all("time[data-ago]")) {
      const text = ago(new Date(each.dateTime));
      if (each.textContent !== text && text !== "NaN s ago") each.textContent = text;
    }
  }

  // Charts

  function short(value) {
    for (const [size, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return +(value / size).toFixed(Math.abs(value) / size < 10 ? 2 : 1) + sign;
    }
    return String(+value.toFixed(2));
  }

  const UNITS = {
    tokens: short,
    requests: short,
    dollars: (value) => (value < 0 ? "−$" : "$") + (Math.abs(value) >= 1000 ? short(Math.abs(value)) : +Math.abs(value).toFixed(Math.abs(value) < 0.1 ? 4 : 2)),
    seconds: (value) => (value < 1 ? +(value * 1000).toFixed(value < 0.01 ? 1 : 0) + " ms" : +value.toFixed(1) + " s"),
  };

  // Columns of a day or more begin at midnight UTC. All others are in local time.
  function formatColumn(at, step) {
    const date = new Date(at * 1000);
    if (step >= DAY_S) return format(date, { day: "numeric", month: "short" }, "UTC");
    return format(date, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
  }

  function formatTick(at, step) {
    const date = new Date(at * 1000);
    if (step >= DAY_S || !(date.getHours() || date.getMinutes())) return format(date, { day: "numeric", month: "short" }, step >= DAY_S ? "UTC" : undefined);
    return format(date, { hour: "2-digit", minute: "2-digit" });
  }

  // Draws a mark above each column with compactions, with the number of the round, or with × and the count
  // of compactions. A mark without a number is hollow. Where there is too little room, marks with a number come
  // first.
  function drawMarks(marks, isRound) {
    return (chart) => {
      const brush = chart.ctx, ratio = devicePixelRatio, y = chart.bbox.top - 4 * ratio;
      const drawn = [], numbered = [];
      const isFree = (x, taken, gap) => taken.every((each) => Math.abs(each - x) >= gap * ratio);
      brush.save();
      brush.fillStyle = brush.strokeStyle = colour("--ink");
      brush.lineWidth = ratio;
      brush.setLineDash([]);
      brush.textAlign = "center";
      brush.textBaseline = "alphabetic";
      brush.font = 11 * ratio + "px " + colour("--text");
      for (const index of [...marks.keys()].sort((a, b) => !!marks[b] - !!marks[a])) {
        const each = marks[index], x = chart.valToPos(chart.data[0][index], "x", true);
        if (each === null || (!isRound && !each) || !isFree(x, drawn, MARK_PX)) continue;
        drawn.push(x);
        brush.beginPath();
        brush.moveTo(x - 4 * ratio, y - 6 * ratio);
        brush.lineTo(x + 4 * ratio, y - 6 * ratio);
        brush.lineTo(x, y);
        brush.closePath();
        if (isRound && !each) brush.stroke();
        else brush.fill();
        if ((isRound ? each : each > 1) && isFree(x, numbered, NUMBER_PX)) {
          numbered.push(x);
          brush.fillText(isRound ? String(each) : `×${each}`, x, y - 10 * ratio);
        }
      }
      brush.restore();
    };
  }

  // A click on a column opens the page of its compaction.
  function openRounds(data, place) {
    const target = (chart) => (chart.cursor.idx == null ? "" : data.places[chart.cursor.idx]);
    return (chart) => {
      chart.over.addEventListener("click", () => { if (target(chart)) location.assign(place.dataset.places + target(chart)); });
      chart.over.addEventListener("mousemove", () => chart.over.classList.toggle("pointing", !!target(chart)));
    };
  }

  function buildSeries(each, index, data) {
    const unit = UNITS[data.unit], ink = colour(COLOURS[each.sign] ?? (index % 2 ? "--ink" : "--accent"));
    const series = { label: each.name, value: (_, at) => (at == null ? "unknown" : unit(at)), points: { show: false } };
    if (each.look === "line") {
      return { ...series, stroke: ink, width: 2, dash: each.dash, points: { show: data.unit === "seconds", size: 5, fill: ink } };
    }
    if (data.x.length > MAX_BARS) return { ...series, paths: uPlot.paths.stepped({ align: 1 }), fill: ink, width: 0 };
    return { ...series, paths: uPlot.paths.bars({ size: [each.sign === "sent" ? 0.86 : 0.6, data.step ? Infinity : 60], gap: 0 }), fill: ink, width: 0 };
  }

  function buildOptions(data, place) {
    const { x, step } = data, unit = UNITS[data.unit], gap = (step || 1) * 0.7;
    const hasBars = data.series.some((each) => each.look === "bar");
    const axis = { stroke: colour("--quiet"), font: "12px " + colour("--text"), ticks: { show: false } };
    return {
      width: place.clientWidth,
      height: HEIGHT_PX[place.dataset.size] ?? HEIGHT_PX.large,
      padding: [data.marks ? 26 : 10, 20, 0, 0],
      cursor: { drag: { x: false, y: false }, y: false },
      tzDate: (at) => (step >= DAY_S ? uPlot.tzDate(new Date(at * 1000), "Etc/UTC") : new Date(at * 1000)),
      series: [
        { label: step ? "from" : "request", value: (_, at) => (at == null ? "" : step ? formatColumn(at - step / 2, step) : at) },
        ...data.series.map((each, index) => buildSeries(each, index, data)),
      ],
      axes: [
        { ...axis, grid: { show: false }, space: 64, values: (_, ticks) => ticks.map((at) => (step ? formatTick(at, step) : at % 1 ? "" : at)) },
        { ...axis, grid: { stroke: colour("--line"), width: 1 }, values: (_, ticks) => ticks.map(unit), size: (_, texts) => 16 + 7 * Math.max(3, ...(texts ?? []).map((each) => each.length)) },
      ],
      scales: {
        x: { time: !!step, range: (_, low, high) => (step ? [low - step / 2, high + step / 2] : hasBars ? [low - gap, high + gap] : [low, high > low ? high : low + 1]) },
        y: { range: (_, low, high) => [Math.min(0, low * 1.05), (high || 1) * 1.05] },
      },
      hooks: {
        draw: data.marks ? [drawMarks(data.marks, !step)] : [],
        ready: place.dataset.places ? [openRounds(data, place)] : [],
      },
    };
  }

  function draw(place) {
    const data = JSON.parse(place.dataset.chart);
    charts.get(place)?.destroy();
    charts.delete(place);
    if (!data.x.length) return;
    const middles = data.x.map((at) => at + data.step / 2); // a column of the overview covers the time from `at`
    charts.set(place, new uPlot(buildOptions(data, place), [middles, ...data.series.map((each) => each.values)], place));
  }

  function drawAll() {
    for (const place of charts.keys()) if (!place.isConnected) charts.delete(place);
    all("[data-chart]").forEach(draw);
  }

  // Parts of a page that are loaded again

  async function load(url) {
    const answer = await fetch(url);
    if (!answer.ok) throw new Error(String(answer.status));
    return new DOMParser().parseFromString(await answer.text(), "text/html");
  }

  // Replaces an element by the one with the same id. Open details stay open, equal charts stay drawn, and the
  // focus stays where it is.
  function replace(old, page) {
    const fresh = page.getElementById(old.id);
    if (!fresh) return;
    const node = document.importNode(fresh, true);
    const key = (each, index) => each.dataset.key ?? index;
    const open = new Map(all("details", old).map((each, index) => [key(each, index), each.open]));
    all("details", node).forEach((each, index) => { each.open = open.get(key(each, index)) ?? each.open; });
    const focus = all("a, summary", old).indexOf(document.activeElement);
    for (const place of all("[data-chart]", node)) {
      const drawn = all("[data-chart]", old).find((each) => each.dataset.chart === place.dataset.chart);
      if (drawn) place.replaceWith(drawn);
    }
    old.replaceWith(node);
    all("a, summary", node)[focus]?.focus({ preventScroll: true });
    showTimes(node);
    for (const place of charts.keys()) if (!place.isConnected) charts.delete(place);
    all("[data-chart]", node).filter((place) => !charts.has(place)).forEach(draw);
  }

  // A part is not replaced while somebody fills in a form of it, answers a question, or selects text.
  function isBusy(part) {
    const selection = getSelection(), active = document.activeElement;
    return (
      (part.contains(active) && active.matches("input, select, textarea, button")) ||
      part.querySelector(".confirm[open]") !== null ||
      (!selection.isCollapsed && part.contains(selection.anchorNode))
    );
  }

  // The clocks of the browser and of the proxy may differ: this is the time of the browser.
  function markRefreshed() {
    const state = document.getElementById("refreshed");
    if (!state) return;
    state.classList.remove("stale");
    state.querySelector("time").dateTime = new Date().toISOString();
    showTimes(state);
  }

  async function refresh() {
    const parts = all("[data-live]").filter((each) => !isBusy(each));
    if (document.hidden || !parts.length) return;
    const state = document.getElementById("refreshed");
    try {
      const page = await load(location.href);
      for (const each of parts) replace(each, page);
      markRefreshed();
    } catch {
      state?.classList.add("stale"); // the style sheet says what this means
    }
  }

  async function loadInPlace(url, target) {
    try {
      replace(document.querySelector(target), await load(url));
    } catch {
      location.assign(url); // the page itself says what is wrong
    }
  }

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!form.dataset.into) return;
    event.preventDefault();
    loadInPlace(`${form.action}?${new URLSearchParams(new FormData(form))}`, form.dataset.into);
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-into]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    loadInPlace(link.href, link.dataset.into);
  });

  // Columns of different height

  // Keeps the short column of a row in view while the long one passes: from its top, or from its bottom if it
  // is taller than the window.
  function placeColumns() {
    for (const each of all(".sticks")) each.style.top = `${Math.min(48, innerHeight - each.offsetHeight - 16)}px`;
  }

  // Sliders

  document.addEventListener("input", ({ target }) => {
    const output = target.type === "range" && document.querySelector(`output[data-of="${target.id}"]`);
    if (output) output.textContent = +target.value ? (+target.value).toLocaleString("en") : output.dataset.zero;
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    placeColumns();
    if (innerWidth === width) return;
    width = innerWidth;
    for (const [place, chart] of charts) chart.setSize({ width: place.clientWidth, height: chart.height });
  });
  showTimes();
  markRefreshed();
  placeColumns();
  drawAll();
  setInterval(showAges, 1_000);
  const every = Math.min(...all("[data-live]").map((each) => +each.dataset.live));
  if (isFinite(every)) setInterval(refresh, every * 1_000);
  const zone = document.getElementById("zone");
  if (zone) zone.textContent = Intl.DateTimeFormat().resolvedOptions().timeZone;
})();
