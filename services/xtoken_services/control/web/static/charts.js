// Charts of one run, or of several over each other: metrics are fetched once, then only new ones; drawn by uPlot.
"use strict";
{
  const MAX_POINTS = 4000;
  const PAGE_POINTS = 1500;
  const SMOOTH_MIN = 80;
  const COLOURS = 6;
  const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];
  const HEIGHTS = { main: 250, detail: 140, speed: 140 };
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const sans = getComputedStyle(document.body).fontFamily;
  /** Return a colour of the style sheet in the current theme. */
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };

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
    /** Return a metric times its factors. */
    column({ key, factor, factorKeys }, divisor) {
      const value = (row) => factorKeys.reduce((product, name) => product * (row[name] ?? 1), row[key] * factor / divisor);
      return this.rows.map((row) => (row[key] === undefined || row[key] === null ? null : value(row)));
    }
  }

  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    if (size && size < 1e-3) return value.toExponential(1);
    return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
  };
  const exact = (value) => (value === null || value === undefined || Math.abs(value) >= 1000 || Math.abs(value) < 1e-3 ? short(value) : String(Number(value.toPrecision(4))));
  /** Return the labels of an axis: with the digits that its step needs, and no more. */
  const ticks = (values, step) => {
    const [, decimals = ""] = String(Number(step.toPrecision(3))).split(".");
    const digits = { minimumFractionDigits: decimals.length, maximumFractionDigits: decimals.length };
    const label = (value) => (step < 1e-4 ? Number(value.toPrecision(3)).toExponential() : value.toLocaleString("en-US", digits));
    return values.map((value) => (value ? label(value) : "0"));
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

  async function getJson(path) {
    const response = await fetch(path, { headers: { Accept: "application/json" } });
    if (response.status === 401) location.reload();
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    return response.json();
  }

  /** Metrics of one run. */
  class Run {
    constructor(id, label, index, launch) {
      Object.assign(this, { id, label, index, launch });
      this.sources = { steps: new Columns(), eval: new Columns(), gauges: new Columns() };
    }

    /** Fetch new metrics; fetch all again after a rewind or if there are too many points. */
    async read(gauges) {
      const { steps, eval: held } = this.sources;
      // An evaluation is written after the step before it, so new rows of both kinds are after the last step.
      const metrics = await getJson(`/v1/runs/${this.id}/metrics?after=${steps.x.at(-1) ?? -1}&points=${PAGE_POINTS}`);
      const launch = this.launch();
      const cut = metrics.steps_total < steps.total || metrics.eval_total < held.total || launch !== this.seen;
      this.seen = launch;
      if (cut && steps.x.length) {
        steps.clear();
        held.clear();
        await this.read(gauges);
        return;
      }
      steps.add(metrics.steps.filter((row) => row.step > (steps.x.at(-1) ?? -1)), "step");
      held.add(metrics.eval.filter((row) => row.step > (held.x.at(-1) ?? -1)), "step");
      steps.total = metrics.steps_total;
      held.total = metrics.eval_total;
      if (steps.x.length > MAX_POINTS) steps.clear();
      if (gauges) this.sources.gauges.add(await getJson(`/runs/${this.id}/gauges?after=${this.sources.gauges.x.at(-1) ?? 0}`), "time");
    }
  }

  const tracks = [...document.querySelectorAll("#tracks [data-run]")];
  const several = tracks.length > 0;
  const head = document.getElementById("run-head");
  const runs = several
    ? tracks.map((item, index) => new Run(item.dataset.run, item.dataset.label, index, () => ""))
    : [new Run(head.dataset.run, "", 0, () => document.getElementById("run-head").dataset.launch)];

  /** A chart: its plot, and a legend with the values under the pointer. */
  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.plotElement = figure.querySelector(".plot");
      this.source = figure.dataset.source;
      this.divisor = Number(figure.dataset.divisor);
      this.height = HEIGHTS[figure.dataset.group];
      this.floor = figure.dataset.floor === undefined ? null : Number(figure.dataset.floor);
      this.minLines = Number(figure.dataset.minLines);
      this.requested = [...figure.querySelectorAll(".legend li")].map(({ dataset }) => ({
        ...dataset, factor: Number(dataset.factor), factorKeys: dataset.factorKeys.split(" ").filter(Boolean),
      }));
      this.drawn = "";
    }

    /** Return the lines that there are metrics for. */
    lines() {
      const all = runs.flatMap((run) => this.linesOf(run));
      return all.map((line, position) => ({ ...line, colour: (several ? line.run.index : position) % COLOURS }));
    }

    linesOf(run) {
      const names = [...run.sources[this.source].names].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
      const named = (label) => [run.label, label].filter(Boolean).join(" ");
      return this.requested.flatMap((wanted) => {
        const { key, label, singleLabel } = wanted;
        if (!key.endsWith("*")) return names.includes(key) ? [{ ...wanted, run, label: named(label), dash: DASHES[0] }] : [];
        const matching = names.filter((name) => name.startsWith(key.slice(0, -1)));
        const which = (name) => name.slice(key.length - 1).replace(/^_t/, "");
        const text = (name) => (matching.length > 1 || key.startsWith("gpu") || key.startsWith("task") ? `${label} ${which(name)}`.trim() : singleLabel);
        return matching.map((name, index) => ({ ...wanted, run, key: name, label: named(text(name)), dash: DASHES[several ? index % DASHES.length : 0] }));
      });
    }

    folded() { return this.figure.closest("details")?.open === false; }

    draw() {
      const lines = this.lines();
      this.figure.hidden = lines.length < this.minLines;
      if (this.figure.hidden || this.folded()) return;
      const columns = lines.map((line) => line.run.sources[this.source].column(line, this.divisor));
      const smooth = this.source === "steps" && lines.some((line) => line.run.sources.steps.x.length >= SMOOTH_MIN);
      const data = this.joined(lines, [...columns, ...(smooth ? columns.map(runningMean) : [])]);
      const drawn = lines.map((line) => line.run.id + line.key).join() + smooth;
      this.smooth = smooth;
      if (drawn !== this.drawn) this.make(lines, data);
      else this.plot.setData(data);
      this.drawn = drawn;
      this.updateLegend();
    }

    /** Return the columns over one x axis: that of all runs together. */
    joined(lines, columns) {
      if (runs.length === 1) return [runs[0].sources[this.source].x, ...columns];
      return uPlot.join(columns.map((column, index) => [lines[index % lines.length].run.sources[this.source].x, column]));
    }

    make(lines, data) {
      this.plot?.destroy();
      this.count = lines.length;
      const legend = this.figure.querySelector(".legend");
      legend.replaceChildren(...lines.map((line) => {
        const item = document.createElement("li");
        item.className = `s${line.colour}`;
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
      const series = (line, alpha) => ({
        stroke: colour(`--series-${line.colour}`), alpha, width: alpha < 1 ? 1 : 1.75, spanGaps: true, dash: line.dash, points: { show: (plot) => few || plot.data[0].length < 2, size: 5 },
      });
      const whole = (_, all) => all.map((value) => (Number.isInteger(value) ? value.toLocaleString("en-US") : ""));
      return {
        width: this.plotElement.clientWidth, height: this.height, padding: [10, this.byTime() ? 30 : 14, 0, 0], legend: { show: false },
        cursor: { sync: { key: this.byTime() ? "time" : "step" }, points: { size: 7, width: 2 }, drag: { x: true, y: false } },
        scales: { x: { time: this.byTime() }, y: { range: (_, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, grid: { show: false }, gap: 6, size: 28, ...(this.byTime() ? { gap: 11, size: 33, space: 90, values: (_, all) => all.map(clock) } : { values: whole }) },
          { ...axis, gap: 8, space: this.height > 200 ? 36 : 28, size: (_, values) => 20 + 6.4 * Math.max(2, ...(values ?? []).map((value) => value.length)), values: (_, all, axis, space, step) => ticks(all, step) },
        ],
        series: [{}, ...lines.map((line) => series(line, smooth ? 0.3 : 1)), ...(smooth ? lines.map((line) => series(line, 1)) : [])],
        hooks: { setCursor: [() => this.updateLegend()] },
      };
    }

    range(low, high) {
      if (low === null || (low === 0 && high === 0 && this.floor === 0)) return [0, 1];
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      return [this.floor !== null ? Math.min(this.floor, low) : low - room, high + room];
    }

    /** Show the values at or before the pointer in the legend, or else the last ones. */
    updateLegend() {
      const index = this.plot.cursor.idx;
      const known = (value) => value !== null && value !== undefined;
      const texts = this.plot.data.slice(1, this.count + 1).map((column) => {
        const until = index === null || index === undefined ? column : column.slice(0, index + 1);
        return exact(until.findLast(known));
      });
      this.figure.querySelectorAll(".legend b").forEach((item, number) => { item.textContent = texts[number]; });
      const x = index === null || index === undefined ? null : this.plot.data[0][index];
      const at = this.byTime() ? clock : (step) => `step ${step.toLocaleString("en-US")}`;
      this.figure.dataset.at = x === null ? (this.smooth && this.height > 200 ? "bold: moving average" : "") : at(x);
    }

    /** Redraw in the current colours. */
    redraw() {
      this.drawn = "";
      this.draw();
    }
  }

  const charts = [...document.querySelectorAll(".curve")].map((figure) => new Chart(figure));
  const drawAll = () => { for (const curve of charts) curve.draw(); };

  let reading = false;
  async function refresh() {
    if (reading) return;
    reading = true;
    try {
      await Promise.all(runs.map((run) => run.read(!several)));
      drawAll();
      document.getElementById("no-curves").hidden = charts.some((curve) => !curve.figure.hidden);
      const speed = document.getElementById("speed");
      if (speed) speed.hidden = !speed.querySelector(".curve:not([hidden])");
    } catch {
      document.getElementById("unreachable").hidden = false;
    } finally {
      reading = false;
    }
  }

  const fit = (curve) => curve.plot && curve.plotElement.clientWidth && curve.plot.setSize({ width: curve.plotElement.clientWidth, height: curve.height });
  document.body.addEventListener("tick", refresh);
  document.addEventListener("colours", () => charts.forEach((curve) => curve.redraw()));
  document.getElementById("speed")?.addEventListener("toggle", drawAll);
  const resized = new ResizeObserver(() => charts.forEach(fit));
  for (const curve of charts) resized.observe(curve.plotElement);  // a row's first chart has all of it until the next appears
  refresh();
}
