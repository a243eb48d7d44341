"use strict";
// Search, the table of all prompts, one prompt by its link, deep links and copy buttons. Findings, charts, lengths and
// times can be read without it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const rows = data.rows || [];
  const byId = (id) => document.getElementById(id);
  const el = (tag, props = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), props);
    made.append(...children.filter((c) => c !== null && c !== undefined && c !== ""));
    return made;
  };

  // --- state: the filter, the order and the open prompt are the page's fragment, so that each can be linked ----------
  const form = byId("filter");
  const fields = form ? [...form.elements].filter((f) => f.name) : [];
  let sort = "", open = "", most = 0;
  const isState = (hash) => hash.includes("=");
  const address = (p) => {
    const values = fields.map((f) => [f.name, f.value]);
    const all = [...values, ["sort", sort], ["p", p]].filter(([, value]) => value);
    return "#" + new URLSearchParams(all);
  };
  const read = () => {
    const wanted = new URLSearchParams(isState(location.hash) ? location.hash.slice(1) : "");
    fields.forEach((f) => {
      f.value = wanted.get(f.name) || "";
      if (f.selectedIndex === -1) f.value = "";
    });
    sort = wanted.get("sort") || "";
    open = wanted.get("p") || "";
  };
  const write = () => history.replaceState(null, "", address(open) === "#" ? location.pathname : address(open));

  // --- what the filter leaves ------------------------------------------------------------------------------------
  const words = () => (form ? form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean) : []);
  const chosen = () => fields.filter((f) => f.name !== "q" && f.value);
  const name = (row) => `${row.cell}/${row.scenario}/${row.form}/${row.key}`;
  rows.forEach((row) => {
    row.name = name(row);
    row.checks = [...new Set((row.findings || []).map((f) => f[0]))].join(", ");
    row.text = [row.name, row.stratum, row.verdict || "not compared", row.checks, row.error || "",
      ...(row.findings || []).map((f) => f[2])].join(" ").toLowerCase();
  });
  const fits = (row) => chosen().every((f) => row[f.name] === f.value)
    && words().every((w) => (w.startsWith("n=") ? String(row.length) === w.slice(2) : row.text.includes(w)));
  const items = [...document.querySelectorAll("[data-cell]")];
  const cards = items.filter((i) => i.matches(".cause, .finding"));
  const filterItems = () => {
    const left = words().filter((w) => !w.startsWith("n="));
    items.forEach((item) => {
      const apart = chosen().some((f) => item.dataset[f.name] !== undefined
        && !item.dataset[f.name].split("\n").includes(f.value));
      const text = left.length && cards.includes(item) ? item.textContent.toLowerCase() : "";
      item.hidden = apart || (text !== "" && !left.every((w) => text.includes(w)));
    });
    const none = byId("none");
    if (none && cards.length) {
      none.hidden = cards.some((c) => c.matches(".cause") && !c.hidden);
      none.firstElementChild.hidden = false;
    }
    // A method's charts belong to all of its cells.
    const cell = form && form.elements.cell.value;
    document.querySelectorAll("figure[data-method]").forEach((f) => {
      f.hidden = Boolean(cell) && !cell.includes(f.dataset.method.split("@")[0]);
    });
  };

  // --- the table of all prompts --------------------------------------------------------------------------------------
  const GRAVE = ["REGRESSION", "DRIFT", "UNKNOWN", "SUSPECT", "IMPROVED", "KNOWN", undefined, "PASS"];
  const SYMBOL = { PASS: "✔", REGRESSION: "✘", DRIFT: "⇄", IMPROVED: "▲", SUSPECT: "≈", KNOWN: "◆", UNKNOWN: "?" };
  const FIRST = 7, MORE = 100;
  const COLUMNS = [["prompt", "key"], ["cell", "cell"], ["scenario", "scenario"], ["length", "length"],
    ["stratum", "stratum"], ["verdict", "verdict"], ["tokens", "tokens"], ["checks", "checks"],
    ["accepted", "accepted"], ["seconds", "seconds"]];
  const rank = (row, key) => {
    if (key === "verdict") return GRAVE.indexOf(row.verdict);
    if (key === "tokens") return typeof row.tokens === "number" ? row.tokens : row.tokens === "equal" ? 1e9 : 2e9;
    return row[key] ?? "";
  };
  const ordered = () => {
    const key = sort.replace("-", ""), turn = sort.startsWith("-") ? -1 : 1;
    const left = rows.filter(fits);
    if (!key) return left;
    return left.sort((a, b) => {
      const [x, y] = [rank(a, key), rank(b, key)];
      return turn * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
    });
  };
  const chip = (verdict) => (verdict
    ? el("span", { className: `verdict ${verdict}` }, `${SYMBOL[verdict]} ${verdict}`) : el("span", {}, "–"));
  const bdi = (text) => el("bdi", {}, text);
  const prose = (text) => el("bdi", {}, ...text.split(/`(harness [^`]+)`/).map((t, i) => (i % 2 ? el("code", {}, t) : t)));
  const table = byId("table");
  const draw = () => {
    if (!table) return;
    const left = ordered();
    const head = el("tr", {}, ...COLUMNS.map(([title, key]) => {
      const mine = sort.replace("-", "") === key;
      const th = el("th", { scope: "col" });
      if (mine) th.setAttribute("aria-sort", sort.startsWith("-") ? "descending" : "ascending");
      th.append(el("button", { type: "button", className: "sort", onclick: () => {
        sort = mine && !sort.startsWith("-") ? `-${key}` : key;
        write(); draw();
        table.querySelectorAll("th button")[COLUMNS.findIndex((c) => c[1] === key)].focus();
      } }, title, mine ? (sort.startsWith("-") ? " ↓" : " ↑") : ""));
      return th;
    }));
    const body = left.slice(0, most).map((row) => el("tr", { className: row.name === open ? "open" : "" },
      el("th", { scope: "row" }, el("a", { href: address(row.name) }, bdi(row.key)), row.form === "text" ? " as text" : ""),
      el("td", {}, bdi(row.cell)), el("td", {}, bdi(row.scenario)), el("td", { className: "n" }, String(row.length)),
      el("td", {}, row.stratum), el("td", {}, chip(row.verdict)),
      el("td", {}, typeof row.tokens === "number" ? `differ from ${row.tokens}` : row.tokens), el("td", { title: row.checks }, row.checks.replace(/, .*/, (rest) => ` +${rest.split(", ").length - 1}`)),
      el("td", { className: "n" }, row.accepted === undefined ? "–" : row.accepted.toFixed(2)),
      el("td", { className: "n" }, row.seconds.toFixed(2))));
    const more = left.length > most ? el("p", {}, el("button", { type: "button", onclick: () => { most += MORE; draw(); } },
      `show ${Math.min(MORE, left.length - most)} more of ${left.length.toLocaleString("en")}`)) : "";
    table.replaceChildren(el("table", { className: "prompts" }, el("thead", {}, head), el("tbody", {}, ...body)), more || "");
    table.hidden = false;
    const counted = (list) => `${list.filter((i) => !i.hidden).length} of ${list.length}`;
    byId("shown").textContent = chosen().length || words().length
      ? `${left.length} of ${rows.length} requests, ${counted(cards.filter((c) => c.matches(".finding")))} groups of findings shown: ${
        [...chosen().map((f) => `${f.name} ${f.value}`), ...words()].join(", ")}` : "";
    form.classList.toggle("narrowed", byId("shown").textContent !== "");
  };

  // --- one prompt ----------------------------------------------------------------------------------------------------
  const piece = (id) => data.pieces[id] ?? String(id);
  const tokens = (ids, from, kind) => ids.map((id, i) =>
    el("span", { className: `token ${kind}`, title: `token ${from + i}, id ${id}` }, bdi(piece(id))));
  const apart = (spans) => spans.flatMap((s) => [s, " "]);
  const answer = (row) => {
    const output = data.sequences[row.output];
    const expected = data.sequences[row.expected];
    if (!output || !row.diff || !expected) return output ? tokens(output, 0, "") : null;
    return row.diff.flatMap(([i, j, k, m]) => {
      const old = expected.slice(i, j), fresh = output.slice(k, m);
      if (String(old) === String(fresh)) return tokens(fresh, k, "");
      return [...tokens(old, i, "del"), ...tokens(fresh, k, "ins")];
    });
  };
  // Accepted drafts per step, as StepStrip has them; the page shows those of an example in the same way without scripts.
  const drafts = ([against, columns, before, after, tookOver, placedBy]) => {
    const column = (kind, title, ...texts) => el("span", { className: kind, title }, ...texts.map((t) => el("i", {}, t)));
    const side = (n) => columns.map((c) => c[n]).filter((v) => v !== null).join(", ");
    const took = tookOver && !before;
    return [
      el("p", { className: "drafts", role: "img",
        ariaLabel: `accepted drafts per step${took ? " since D took over" : ""}: expected (${against}) ${side(1)}; found ${side(2)}` },
      column("side", "", "expected", "found"),
      before ? column("side", "", `${before} alike …`) : took ? el("span", { className: "took", title: "D took over" }, "D") : "",
      ...columns.map(([token, expected, found]) => column(
        expected !== null && found !== null && expected !== found ? "hit" : "", `${placedBy} ${token}`, expected ?? "", found ?? "")),
      after ? column("side", "", `… ${after} more`) : ""),
      el("p", { className: "key" }, `Accepted drafts per step${placedBy === "token" ? ", at the output token where it begins" : ""}: expected (`,
        bdi(against), ") over found, underlined where they differ.", ...(took ? [" ", el("b", {}, "D"), ": here D took over."] : [])),
    ];
  };
  const blocks = (row) => {
    const ids = data.sequences[row.prompt] || [];
    const out = [];
    for (let b = 0; b * row.block < ids.length; b += 1) {
      const hit = (row.damaged || []).includes(b);
      out.push(el("div", { className: hit ? "kv hit" : "kv" }, el("b", {}, `block ${b}${hit ? " · damaged" : ""}`), " ",
        ...apart(tokens(ids.slice(b * row.block, (b + 1) * row.block), b * row.block, ""))));
    }
    return out;
  };
  const command = (line) => {
    const span = el("span", { className: "repro" }, el("code", {}, line), " ", el("button", { type: "button", className: "copy" }, "copy"));
    armed(span.querySelector("button"));
    return span;
  };
  const box = byId("prompt");
  const show = () => {
    if (!box) return;
    const row = rows.find((r) => r.name === open);
    box.hidden = !row;
    box.replaceChildren();
    if (!row) {
      if (open) { box.hidden = false; box.append(el("p", {}, "This run has no such request: ", bdi(open))); }
      return;
    }
    const list = ordered(), at = list.indexOf(row);
    const step = (to, text) => (list[to] ? el("a", { href: address(list[to].name) }, text) : "");
    const found = answer(row);
    const details = (title, ...children) => el("details", {}, el("summary", {}, title), ...children);
    box.append(
      el("p", { className: "steps" }, step(at - 1, "← previous"), step(at + 1, "next →"), el("a", { href: address("") + (address("") === "#" ? "prompts" : "") }, "close")),
      el("h3", {}, chip(row.verdict), " ", bdi(row.key), " · ", bdi(row.cell), row.scenario === "cold" ? "" : " in ", row.scenario === "cold" ? "" : bdi(row.scenario)),
      el("p", { className: "soft" }, `${row.length} prompt tokens (${row.stratum}, ${row.length % row.block} mod ${row.block}), sent as ${row.form}; ${row.seconds.toFixed(2)} s`
        + (row.accepted === undefined ? "" : `; ${row.accepted.toFixed(2)} accepted drafts per step`)
        + (typeof row.tokens === "number" ? `; tokens differ from output ${row.tokens} on` : `; tokens ${row.tokens}`)
        + (row.gap === undefined ? "" : `; gap between the two best tokens there ${row.gap.toFixed(3)} nats`)),
      row.error ? el("p", { className: "message" }, bdi(row.error)) : "",
      row.where ? el("p", {}, "Where: ", bdi(row.where)) : "",
      el("h4", {}, row.diff ? "Answer: expected tokens struck out, found ones underlined" : "Answer"),
      found ? el("p", { className: "diff", tabIndex: 0, role: "region", ariaLabel: "Answer" }, ...apart(found)) : el("p", { className: "soft" }, "none, or not embedded in this page; see the files"),
      ...(row.drafts ? drafts(row.drafts) : []),
      ...(row.findings || []).map(([check, verdict, message, line]) => el("div", { className: "of" },
        el("p", {}, chip(verdict), " ", el("strong", {}, check), " ", prose(message)), line ? el("p", {}, command(line)) : "")),
      details(`The prompt, block by block`, el("div", { className: "prompt" }, ...blocks(row))),
      row.sides && row.sides.length ? details("The hand-off", el("div", { className: "sides" }, ...row.sides.map(([side, facts]) =>
        el("div", {}, el("h4", {}, side), el("dl", {}, ...facts.flatMap(([k, v]) => [el("dt", {}, bdi(k)), el("dd", { className: "mono" }, bdi(v))])))))) : "",
    );
  };

  // --- links ---------------------------------------------------------------------------------------------------------
  // The bar at the top covers what is scrolled to the top; its height depends on the window and on what it says.
  const uncover = () => {
    const covered = form && getComputedStyle(form).position === "sticky" ? form.offsetHeight : 0;
    document.documentElement.style.setProperty("--covered", `${covered}px`);
  };
  const apply = () => { most = Math.max(most, FIRST); filterItems(); draw(); uncover(); };
  const follow = () => {
    const before = open;
    if (isState(location.hash) || !location.hash.slice(1)) read();
    else open = "";
    apply();
    show();
    if (open && open !== before) { box.scrollIntoView(); box.focus({ preventScroll: true }); return; }
    if (isState(location.hash)) { if (!open && table) byId("prompts").scrollIntoView(); return; }
    let target = null;
    try { target = byId(decodeURIComponent(location.hash.slice(1))); } catch { /* not a place on the page */ }
    if (!target) return;
    if (target.closest("[hidden]") && form) { fields.forEach((f) => { f.value = ""; }); apply(); }
    for (let d = target.closest("details"); d; d = d.parentElement.closest("details")) d.open = true;
    target.scrollIntoView();
  };
  window.addEventListener("hashchange", follow);
  window.addEventListener("resize", uncover);
  if (form) {
    form.hidden = false;
    form.addEventListener("input", () => { most = FIRST; apply(); show(); write(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.querySelector("button").addEventListener("click", () => {
      fields.forEach((f) => { f.value = ""; });
      sort = ""; most = FIRST;
      apply(); write();
    });
  }

  // --- copying -------------------------------------------------------------------------------------------------------
  const fallback = (text) => {
    const area = el("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  };
  function armed(button) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = button.previousElementSibling.textContent;
      try { await navigator.clipboard.writeText(text); } catch { fallback(text); }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
  document.querySelectorAll("button.copy").forEach(armed);
  follow();
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
