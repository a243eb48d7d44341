"use strict";
// Filters, deep links, copy buttons and charts of report.html. Everything on the page can be read without it.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const byId = new Map(charts.map((c) => [c.id, c]));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const config = () => {
    const ink = css("--ink"), soft = css("--soft"), line = css("--line");
    const text = { labelColor: soft, titleColor: ink, labelFont: "system-ui, sans-serif", titleFont: "system-ui, sans-serif" };
    return {
      background: "transparent",
      view: { stroke: line },
      axis: { ...text, gridColor: line, domainColor: soft, tickColor: soft },
      legend: { ...text, orient: "bottom", columns: window.innerWidth < 600 ? 1 : 3, labelLimit: 260 },
      range: { category: ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"].map(css) },
    };
  };

  const draw = (box) => {
    const chart = byId.get(box.dataset.chart);
    if (!chart || !window.vegaEmbed) return Promise.resolve();
    box.dataset.drawn = "yes";
    // The interpreter evaluates expressions without eval, which the page's policy forbids.
    return vegaEmbed(box, chart.spec, { actions: false, renderer: "svg", ast: true, config: config() })
      .then(() => box.classList.add("drawn"))
      .catch((error) => { box.textContent = "This chart could not be drawn: " + error; });
  };
  const boxes = [...document.querySelectorAll("[data-chart]")];
  // One after the other, each in a task of its own: filters and links work from the start.
  const drawAll = (left) => {
    if (left.length) setTimeout(() => draw(left[0]).then(() => drawAll(left.slice(1))));
    else document.documentElement.dataset.drawn = Math.round(performance.now());
  };
  const redraw = () => drawAll(boxes);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  const form = document.getElementById("filter");
  const fields = form ? [...form.querySelectorAll("select")] : [];
  const shown = document.getElementById("shown");
  const items = [...document.querySelectorAll("[data-cell], [data-method]")];
  const fits = (item, name, wanted) => {
    const has = item.dataset[name];
    return !wanted || has === undefined || has.split(" ").includes(wanted);
  };
  const apply = () => {
    const cell = fields.find((f) => f.name === "cell");
    const wanted = Object.fromEntries(fields.map((f) => [f.name, f.value]));
    if (cell && wanted.cell && !wanted.method) wanted.method = cell.selectedOptions[0].dataset.method || "";
    let count = 0;
    items.forEach((item) => {
      const fit = Object.entries(wanted).every(([name, value]) => fits(item, name, value));
      item.hidden = !fit;
      if (fit && item.classList.contains("finding")) count += 1;
    });
    if (shown) shown.textContent = count + (count === 1 ? " finding shown" : " findings shown");
  };
  if (form) {
    form.hidden = false;
    form.addEventListener("change", apply);
    form.addEventListener("reset", () => setTimeout(apply));
    form.addEventListener("submit", (event) => event.preventDefault());
    apply();
  }

  const follow = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    if (target.closest("[hidden]") && form) { form.reset(); items.forEach((i) => { i.hidden = false; }); }
    for (let d = target.closest("details"); d; d = d.parentElement.closest("details")) d.open = true;
    target.scrollIntoView();
  };
  window.addEventListener("hashchange", follow);
  follow();

  const fallback = (text) => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };
  document.querySelectorAll("button.copy").forEach((button) => {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = button.previousElementSibling.textContent;
      try { await navigator.clipboard.writeText(text); } catch { fallback(text); }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  });
  document.documentElement.dataset.ready = Math.round(performance.now());
  drawAll(boxes);
})();
