// Charts of a run: metrics are fetched once, then only new ones; drawn by uPlot.
"use strict";
{
  const MAX_POINTS = 4000;
  const PAGE_POINTS = 1500;
  const SMOOTH_MIN = 80;
  const head = () => document.getElementById("run-head").dataset;
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const sans = getComputedStyle(document.body).fontFamily;
  /** Return a colour of the style sheet in the current theme. */
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const sources = {};

  /** Columns of one source by metric; `x` is the step or time. */
  class Columns {
    constructor() { this.clear(); }
    clear() { this.x = []; this.rows = []; this.names = new Set(); this.total = 0; }
    add(rows, key) {
      for (const row of rows) {
        this.x.push(row[key]);
        this.rows.push(row);
        for (const name in row) this.names.add(name);
      }
    }
    column(name, divisor) { return this.rows.map((row) => (row[name] === undefined ? null : row[name] / divisor)); }
  }
  for (const name of ["steps", "eval", "gauges"]) sources[name] = new Columns();

  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    if (size && size < 1e-3) return value.toExponential(1);
    return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
  };
  /** Exponential moving average over about 1/40 of the points, bias-corrected. */
  const runningMean = (column) => {
    const keep = 1 - 1 / Math.max(5, column.length / 40);
    let sum = 0;
    let weight = 0;
    return column.map((value) => {
      if (value === null) return null;
      sum = keep * sum + value;
      weight = keep * weight + 1;
      return sum / weight;
    });
  };
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

  /** A chart: its plot, and a legend with the values under the pointer. */
  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.plotElement = figure.querySelector(".plot");
      this.source = figure.dataset.source;
      this.divisor = Number(figure.dataset.divisor);
      this.floor = figure.dataset.floor === undefined ? null : Number(figure.dataset.floor);
      this.minLines = Number(figure.dataset.minLines);
      this.requested = [...figure.querySelectorAll(".legend li")].map((item) => ({ ...item.dataset }));
      this.drawn = "";
    }

    /** Return the lines that there are metrics for. */
    lines() {
      const names = [...sources[this.source].names].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
      return this.requested.flatMap(({ key, label, singleLabel }) => {
        if (!key.endsWith("*")) return names.includes(key) ? [{ key, label }] : [];
        const matching = names.filter((name) => name.startsWith(key.slice(0, -1)));
        const which = (name) => name.slice(key.length - 1).replace(/^_t/, "");
        return matching.map((name) => ({ key: name, label: matching.length > 1 || key.startsWith("gpu") ? `${label} ${which(name)}` : singleLabel }));
      });
    }

    draw() {
      const lines = this.lines();
      this.figure.hidden = lines.length < this.minLines;
      if (this.figure.hidden) return;
      const columns = sources[this.source];
      const values = lines.map((line) => columns.column(line.key, this.divisor));
      const smooth = this.source === "steps" && columns.x.length >= SMOOTH_MIN;
      const data = [columns.x, ...values, ...(smooth ? values.map(runningMean) : [])];
      const drawn = lines.map((line) => line.key).join() + smooth;
      this.smooth = smooth;
      if (drawn !== this.drawn) this.make(lines, data);
      else this.plot.setData(data);
      this.drawn = drawn;
      this.updateLegend();
    }

    make(lines, data) {
      this.plot?.destroy();
      this.count = lines.length;
      const legend = this.figure.querySelector(".legend");
      legend.replaceChildren(...lines.map((line, index) => {
        const item = document.createElement("li");
        item.className = `s${index % 6}`;
        item.append(Object.assign(document.createElement("i"), { ariaHidden: "true" }), `${line.label} `, document.createElement("b"));
        return item;
      }));
      this.plot = new uPlot(this.options(lines, data.length > lines.length + 1), data, this.plotElement);
      this.plot.root.querySelector("canvas").setAttribute("role", "img");
      this.plot.root.querySelector("canvas").setAttribute("aria-label", `${this.figure.querySelector("h2").textContent} over ${this.byTime() ? "time" : "steps"}`);
    }

    byTime() { return this.source === "gauges"; }

    options(lines, smooth) {
      const font = `11px ${sans}`;
      const axis = { font, stroke: colour("--faint"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
      const few = this.source === "eval";
      const series = (index, alpha) => ({ stroke: colour(`--series-${index % 6}`), alpha, width: alpha < 1 ? 1 : 1.75, spanGaps: true, points: { show: few, size: 5 } });
      return {
        width: this.plotElement.clientWidth, height: 190, padding: [10, this.byTime() ? 30 : 10, 0, 0], legend: { show: false },
        cursor: { sync: { key: this.byTime() ? "time" : "step" }, points: { size: 7, width: 2 }, drag: { x: true, y: false } },
        scales: { x: { time: this.byTime() }, y: { range: (_, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, grid: { show: false }, gap: 6, size: 28, ...(this.byTime() ? { gap: 11, size: 33, space: 90, values: (_, all) => all.map(clock) } : { values: (_, all) => all.map((v) => (Number.isInteger(v) ? v.toLocaleString("en-US") : "")) }) },
          { ...axis, gap: 8, size: (_, values) => 20 + 6.4 * Math.max(2, ...(values ?? []).map((v) => v.length)), values: (_, all) => all.map(short) },
        ],
        series: [{}, ...lines.map((line, index) => series(index, smooth ? 0.3 : 1)), ...(smooth ? lines.map((line, index) => series(index, 1)) : [])],
        hooks: { setCursor: [() => this.updateLegend()] },
      };
    }

    range(low, high) {
      if (low === null) return [0, 1];
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      return [this.floor !== null ? Math.min(this.floor, low) : low - room, high + room];
    }

    /** Show the values under the pointer in the legend, or else the last ones. */
    updateLegend() {
      const index = this.plot.cursor.idx;
      const texts = this.plot.data.slice(1, this.count + 1).map((column) => {
        const at = index ?? column.findLastIndex((value) => value !== null);
        return short(column[at]);
      });
      this.figure.querySelectorAll(".legend b").forEach((item, number) => { item.textContent = texts[number]; });
      const x = index === null || index === undefined ? null : this.plot.data[0][index];
      this.figure.dataset.at = x === null ? (this.smooth ? "bold: moving average" : "") : this.byTime() ? clock(x) : `step ${x.toLocaleString("en-US")}`;
    }

    /** Redraw in the current colours. */
    redraw() {
      this.drawn = "";
      this.draw();
    }
  }

  const charts = [...document.querySelectorAll(".curve")].map((figure) => new Chart(figure));

  async function getJson(path) {
    const response = await fetch(path, { headers: { Accept: "application/json" } });
    if (response.status === 401) location.reload();
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    return response.json();
  }

  /** Fetch new metrics; fetch all again after a rewind or if there are too many points. */
  async function read() {
    const { run, launch } = head();
    const { steps, eval: held, gauges } = sources;
    // An evaluation is written after the step before it, so new rows of both kinds are after the last step.
    const metrics = await getJson(`/v1/runs/${run}/metrics?after=${steps.x.at(-1) ?? -1}&points=${PAGE_POINTS}`);
    const cut = metrics.steps_total < steps.total || metrics.eval_total < held.total || launch !== read.launch;
    if (cut && steps.x.length) {
      steps.clear();
      held.clear();
      read.launch = launch;
      return read();
    }
    read.launch = launch;
    steps.add(metrics.steps.filter((row) => row.step > (steps.x.at(-1) ?? -1)), "step");
    held.add(metrics.eval.filter((row) => row.step > (held.x.at(-1) ?? -1)), "step");
    steps.total = metrics.steps_total;
    held.total = metrics.eval_total;
    if (steps.x.length > MAX_POINTS) steps.clear();
    gauges.add(await getJson(`/runs/${run}/gauges?after=${gauges.x.at(-1) ?? 0}`), "time");
  }

  let reading = false;
  async function refresh() {
    if (reading) return;
    reading = true;
    try {
      await read();
      for (const curve of charts) curve.draw();
      document.getElementById("no-curves").hidden = charts.some((curve) => !curve.figure.hidden);
    } catch {
      document.getElementById("unreachable").hidden = false;
    } finally {
      reading = false;
    }
  }

  document.body.addEventListener("tick", refresh);
  document.addEventListener("colours", () => charts.forEach((curve) => curve.redraw()));
  new ResizeObserver(() => charts.forEach((curve) => curve.plot?.setSize({ width: curve.plotElement.clientWidth, height: 190 }))).observe(document.getElementById("curves"));
  refresh();
}
