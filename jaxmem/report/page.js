// The theme toggle, and the reading of the schedule chart under the pointer or with the arrow keys. The page is complete without either.
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Use the ${dark() ? "light" : "dark"} scheme`); };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();

  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const text = (bytes) => {
    let unit = 0;
    while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
    return `${unit ? bytes.toFixed(2) : bytes} ${units[unit]}`;
  };
  for (const chart of document.querySelectorAll(".schedule")) {
    const plot = chart.querySelector(".plot"), cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
    const { t, kinds } = JSON.parse(chart.querySelector("script").textContent);
    const span = t[t.length - 1] - t[0] || 1;
    let at = 0;
    const show = (index) => {
      at = Math.max(0, Math.min(t.length - 1, index));
      const share = (t[at] - t[0]) / span, rows = kinds.filter((kind) => kind.bytes[at]).reverse();
      cursor.hidden = tip.hidden = false;
      cursor.style.left = `${100 * share}%`;
      const table = document.createElement("table");
      const row = (label, bytes, kind) => {
        const line = table.insertRow(), left = line.insertCell(), right = line.insertCell();
        if (kind) { const mark = document.createElement("i"); mark.className = "swatch"; mark.style.background = `var(--kind-${kind})`; left.append(mark); }
        left.append(label); right.append(text(bytes)); right.className = "number";
      };
      row(`at ${t[at].toLocaleString("en")}`, kinds.reduce((sum, kind) => sum + kind.bytes[at], 0));
      for (const kind of rows) row(kind.label, kind.bytes[at], kind.name);
      tip.replaceChildren(table);
      const x = share * plot.clientWidth, width = tip.offsetWidth;
      tip.style.left = `${Math.max(-50, Math.min(plot.clientWidth - width, x + (x > plot.clientWidth / 2 ? -width - 14 : 14)))}px`;
    };
    const hide = () => { cursor.hidden = tip.hidden = true; };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect(), where = t[0] + span * (event.clientX - box.left) / box.width;
      show(t.findLastIndex((value) => value <= where)); // between two points nothing changes
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -t.length, End: t.length }[event.key];
      if (event.key === "Escape") hide();
      if (step) { event.preventDefault(); show(at + step); }
    });
  }
})();
