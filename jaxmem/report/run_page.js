// Reading the curves under the pointer or with the arrow keys. The page is complete without it.
(() => {
  const ways = {
    number: (value) => (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6) ? value.toExponential(3) : String(+value.toPrecision(5))),
    seconds: (value) => (value < 0.1 ? `${+(value * 1e3).toPrecision(4)} ms` : `${+value.toPrecision(4)} s`),
    count: (value) => Math.round(value).toLocaleString("en"),
  };
  for (const chart of document.querySelectorAll(".curve")) {
    const plot = chart.querySelector(".plot"), cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");
    const { last, reads, curves } = JSON.parse(chart.querySelector("script").textContent);
    const longest = curves.reduce((a, b) => (b.x.length > a.x.length ? b : a));
    // The point of a curve that is nearest to a step: binary search, for the steps ascend.
    const nearest = (x, step) => {
      let low = 0, high = x.length - 1;
      while (low < high) { const middle = (low + high) >> 1; if (x[middle] < step) low = middle + 1; else high = middle; }
      return low > 0 && step - x[low - 1] <= x[low] - step ? low - 1 : low;
    };
    let at = 0;
    const show = (index) => {
      at = Math.max(0, Math.min(longest.x.length - 1, index));
      const step = longest.x[at], share = step / last;
      cursor.hidden = tip.hidden = false;
      cursor.style.left = `${100 * share}%`;
      const table = document.createElement("table");
      const row = (label, value, colour) => {
        const line = table.insertRow(), left = line.insertCell(), right = line.insertCell();
        if (colour) { const mark = document.createElement("i"); mark.className = "swatch"; mark.style.background = colour; left.append(mark); }
        left.append(label); right.append(value); right.className = "number";
      };
      row("step", step.toLocaleString("en"));
      for (const curve of curves) {
        const i = curve === longest ? at : nearest(curve.x, step), own = curve.x[i];
        const where = own === step ? "" : ` at ${own.toLocaleString("en")}`;
        row(curve.label + where, curve.y[i] === null ? "not finite" : ways[reads](curve.y[i]), curve.colour);
      }
      tip.replaceChildren(table);
      const x = share * plot.clientWidth, width = tip.offsetWidth;
      tip.style.left = `${Math.max(-50, Math.min(plot.clientWidth - width, x + (x > plot.clientWidth / 2 ? -width - 14 : 14)))}px`;
    };
    const hide = () => { cursor.hidden = tip.hidden = true; };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      show(nearest(longest.x, (last * (event.clientX - box.left)) / box.width));
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") hide();
      if (by) { event.preventDefault(); show(at + by); }
    });
  }
})();
