// A run's curves: their figures are fetched once and then only what is new; uPlot draws them.
"use strict";
{
  const MOST_POINTS = 4000;
  const ASKED = 1500;
  const SMOOTHED_FROM = 80;
  const head = () => document.getElementById("run-head").dataset;
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const sans = getComputedStyle(document.body).fontFamily;
  /** A colour of the style sheet as it is now, light or dark. */
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const sources = {};

  /** Columns of one source, by the figure's name; `x` is what they go by. */
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
  /** Exponential running mean over about a fortieth of the points, unbiased at its beginning. */
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

  /** One figure of the page: its plot, and the legend that tells the values under the pointer. */
  class Curve {
    constructor(figure) {
      this.figure = figure;
      this.place = figure.querySelector(".plot");
      this.source = figure.dataset.source;
      this.divisor = Number(figure.dataset.divisor);
      this.floor = figure.dataset.floor === undefined ? null : Number(figure.dataset.floor);
      this.least = Number(figure.dataset.least);
      this.asked = [...figure.querySelectorAll(".legend li")].map((item) => ({ ...item.dataset }));
      this.shown = "";
    }

    /** The lines that there are figures of. */
    lines() {
      const names = [...sources[this.source].names].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
      return this.asked.flatMap(({ key, label, alone }) => {
        if (!key.endsWith("*")) return names.includes(key) ? [{ key, label }] : [];
        const found = names.filter((name) => name.startsWith(key.slice(0, -1)));
        const which = (name) => name.slice(key.length - 1).replace(/^_t/, "");
        return found.map((name) => ({ key: name, label: found.length > 1 || key.startsWith("gpu") ? `${label} ${which(name)}` : alone }));
      });
    }

    draw() {
      const lines = this.lines();
      this.figure.hidden = lines.length < this.least;
      if (this.figure.hidden) return;
      const columns = sources[this.source];
      const figures = lines.map((line) => columns.column(line.key, this.divisor));
      const smooth = this.source === "steps" && columns.x.length >= SMOOTHED_FROM;
      const data = [columns.x, ...figures, ...(smooth ? figures.map(runningMean) : [])];
      const shown = lines.map((line) => line.key).join() + smooth;
      this.smooth = smooth;
      if (shown !== this.shown) this.make(lines, data);
      else this.plot.setData(data);
      this.shown = shown;
      this.tell();
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
      this.plot = new uPlot(this.options(lines, data.length > lines.length + 1), data, this.place);
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
        width: this.place.clientWidth, height: 190, padding: [10, this.byTime() ? 30 : 10, 0, 0], legend: { show: false },
        cursor: { sync: { key: this.byTime() ? "time" : "step" }, points: { size: 7, width: 2 }, drag: { x: true, y: false } },
        scales: { x: { time: this.byTime() }, y: { range: (_, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, grid: { show: false }, gap: 6, size: 28, ...(this.byTime() ? { gap: 11, size: 33, space: 90, values: (_, all) => all.map(clock) } : { values: (_, all) => all.map((v) => (Number.isInteger(v) ? v.toLocaleString("en-US") : "")) }) },
          { ...axis, gap: 8, size: (_, values) => 20 + 6.4 * Math.max(2, ...(values ?? []).map((v) => v.length)), values: (_, all) => all.map(short) },
        ],
        series: [{}, ...lines.map((line, index) => series(index, smooth ? 0.3 : 1)), ...(smooth ? lines.map((line, index) => series(index, 1)) : [])],
        hooks: { setCursor: [() => this.tell()] },
      };
    }

    range(low, high) {
      if (low === null) return [0, 1];
      const room = (high - low || Math.abs(high) || 1) * 0.08;
      return [this.floor !== null ? Math.min(this.floor, low) : low - room, high + room];
    }

    /** The legend's values: under the pointer, or else the last. */
    tell() {
      const index = this.plot.cursor.idx;
      const texts = this.plot.data.slice(1, this.count + 1).map((column) => {
        const at = index ?? column.findLastIndex((value) => value !== null);
        return short(column[at]);
      });
      this.figure.querySelectorAll(".legend b").forEach((item, number) => { item.textContent = texts[number]; });
      const x = index === null || index === undefined ? null : this.plot.data[0][index];
      this.figure.dataset.at = x === null ? (this.smooth ? "bold: running mean" : "") : this.byTime() ? clock(x) : `step ${x.toLocaleString("en-US")}`;
    }

    /** Draw anew, in the colours of now. */
    again() {
      this.shown = "";
      this.draw();
    }
  }

  const curves = [...document.querySelectorAll(".curve")].map((figure) => new Curve(figure));

  async function news(path) {
    const answer = await fetch(path, { headers: { Accept: "application/json" } });
    if (answer.status === 401) location.reload();
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  /** Add what is new; all of it is read again where the curves were cut back or have grown too long. */
  async function read() {
    const { run, life } = head();
    const { steps, eval: held, gauges } = sources;
    // A reading of held-out text is written after the step before it, so what is new of both lies beyond the last step.
    const found = await news(`/v1/runs/${run}/metrics?after=${steps.x.at(-1) ?? -1}&points=${ASKED}`);
    const cut = found.steps_total < steps.total || found.eval_total < held.total || life !== read.life;
    if (cut && steps.x.length) {
      steps.clear();
      held.clear();
      read.life = life;
      return read();
    }
    read.life = life;
    steps.add(found.steps.filter((row) => row.step > (steps.x.at(-1) ?? -1)), "step");
    held.add(found.eval.filter((row) => row.step > (held.x.at(-1) ?? -1)), "step");
    steps.total = found.steps_total;
    held.total = found.eval_total;
    if (steps.x.length > MOST_POINTS) steps.clear();
    gauges.add(await news(`/runs/${run}/gauges?after=${gauges.x.at(-1) ?? 0}`), "time");
  }

  let reading = false;
  async function renew() {
    if (reading) return;
    reading = true;
    try {
      await read();
      for (const curve of curves) curve.draw();
      document.getElementById("no-curves").hidden = curves.some((curve) => !curve.figure.hidden);
    } catch {
      document.getElementById("unreachable").hidden = false;
    } finally {
      reading = false;
    }
  }

  document.body.addEventListener("tick", renew);
  document.addEventListener("colours", () => curves.forEach((curve) => curve.again()));
  new ResizeObserver(() => curves.forEach((curve) => curve.plot?.setSize({ width: curve.place.clientWidth, height: 190 }))).observe(document.getElementById("curves"));
  renew();
}
