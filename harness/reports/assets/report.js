"use strict";
// Filters, deep links, copy buttons and charts of report.html. Everything on the page can be read without it.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const byId = new Map(charts.map((c) => [c.id, c]));

  // Colours are the page's own variables, so that charts follow dark mode and print without being drawn again.
  const config = (width) => {
    const font = "system-ui, sans-serif";
    const text = { labelColor: "var(--soft)", titleColor: "var(--ink)", labelFont: font, titleFont: font,
      labelFontSize: 12, titleFontSize: 12 };
    const columns = Math.max(1, Math.floor(width / 170));
    return {
      background: "transparent",
      view: { stroke: "var(--line)" },
      axis: { ...text, gridColor: "var(--line)", domainColor: "var(--soft)", tickColor: "var(--soft)" },
      legend: { ...text, orient: "bottom", columns, labelLimit: width / columns - 40,
        layout: { bottom: { direction: "vertical", anchor: "start" } } },
      range: { category: [1, 2, 3, 4, 5, 6].map((n) => `var(--s${n})`) },
    };
  };

  const draw = (box) => {
    const chart = byId.get(box.dataset.chart);
    // A chart that the filter hides has no width; it is drawn once it is shown.
    if (!chart || !box.clientWidth || box.dataset.drawing) return Promise.resolve();
    box.dataset.drawing = "yes";
    // The interpreter evaluates expressions without eval, which the page's policy forbids.
    const options = { actions: false, renderer: "svg", ast: true, config: config(box.clientWidth) };
    return vegaEmbed(box, chart.spec, options)
      .then(({ view }) => {
        // The box carries the description; the parts of the drawing add nothing to it.
        box.querySelector("svg").setAttribute("aria-hidden", "true");
        box.classList.add("drawn");
        view.addEventListener("click", (_, item) => { if (item?.datum?.report) location.href = item.datum.report; });
      })
      .catch((error) => { box.textContent = "This chart could not be drawn: " + error; });
  };
  const boxes = [...document.querySelectorAll("[data-chart]")];
  // One at a time, each in its own task, so that filters and links work while charts are drawn.
  const drawAll = (left) => {
    if (left.length) setTimeout(() => draw(left[0]).then(() => drawAll(left.slice(1))));
    else document.documentElement.dataset.drawn = Math.round(performance.now());
  };

  const form = document.getElementById("filter");
  const fields = form ? [...form.querySelectorAll("select")] : [];
  const shown = document.getElementById("shown");
  const items = [...document.querySelectorAll("[data-cell], [data-method]")];
  const fits = (item, name, wanted) => {
    const has = item.dataset[name];
    if (!wanted || has === undefined) return true;
    return name === "stratum" ? has.split(" ").includes(wanted) : has === wanted;
  };
  const apply = () => {
    const cell = fields.find((f) => f.name === "cell");
    const wanted = Object.fromEntries(fields.map((f) => [f.name, f.value]));
    if (cell && wanted.cell && !wanted.method) wanted.method = cell.selectedOptions[0].dataset.method || "";
    const chosen = fields.filter((f) => f.value).map((f) => `${f.name} ${f.value}`);
    let count = 0, all = 0;
    items.forEach((item) => {
      const fit = Object.entries(wanted).every(([name, value]) => fits(item, name, value));
      item.hidden = !fit;
      if (item.classList.contains("finding")) { all += 1; count += fit; }
    });
    form.classList.toggle("narrowed", chosen.length > 0);
    shown.textContent = chosen.length ? `${count} of ${all} groups of findings shown: ${chosen.join(", ")}` : "";
    drawAll(boxes);
  };
  const showAll = () => {
    fields.forEach((f) => { f.value = ""; });
    apply();
  };
  if (form) {
    form.hidden = false;
    form.addEventListener("change", apply);
    form.querySelector("button").addEventListener("click", showAll);
    form.addEventListener("submit", (event) => event.preventDefault());
    apply();
  }

  const wanted = () => {
    try { return document.getElementById(decodeURIComponent(location.hash.slice(1))); } catch { return null; }
  };
  const follow = () => {
    const target = location.hash.length > 1 && wanted();
    if (!target) return;
    if (form && target.closest("[hidden]")) showAll();
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
  if (!form) drawAll(boxes);
})();
