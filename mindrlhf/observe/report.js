"use strict";
// Shows the values under the pointer. The charts are whole without it.
(() => {
  const charts = JSON.parse(document.getElementById("hover-data").textContent);

  const format = (value, unit) => {
    if (value === null) return "not finite";
    if (unit === "%") return (100 * value).toFixed(Math.abs(value) < 0.01 ? 2 : 1) + "%";
    const size = Math.abs(value);
    const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2)
      : value.toLocaleString("en", { maximumSignificantDigits: 4 });
    return unit ? text + " " + unit : text;
  };

  const nearest = (steps, step) => {
    let low = 0;
    let high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    return step - steps[low] <= steps[high] - step ? low : high;
  };

  document.querySelectorAll(".chart").forEach((figure, index) => {
    const chart = charts[index];
    const svg = figure.querySelector("svg");
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    figure.append(tip);
    const line = document.createElementNS(svg.namespaceURI, "path");
    line.setAttribute("class", "crosshair");
    svg.append(line);

    const hide = () => {
      tip.hidden = true;
      line.removeAttribute("d");
    };

    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / box.width;
      const x = (event.clientX - box.left) * scale;
      if (x < chart.left - 8 || x > chart.right + 8) return hide();
      const share = Math.min(1, Math.max(0, (x - chart.left) / (chart.right - chart.left)));
      const aimed = chart.low + share * (chart.high - chart.low);
      const found = chart.series.map((series) => nearest(series.steps, aimed));
      const steps = found.map((at, which) => chart.series[which].steps[at]);
      const step = steps.reduce((best, one) => (Math.abs(one - aimed) < Math.abs(best - aimed) ? one : best));

      tip.replaceChildren();
      const heading = document.createElement("b");
      heading.textContent = "step " + step.toLocaleString("en");
      tip.append(heading);
      chart.series.forEach((series, which) => {
        const row = document.createElement("div");
        const swatch = document.createElement("span");
        swatch.className = "swatch c" + (which % 8);
        const elsewhere = steps[which] === step ? "" : " (step " + steps[which].toLocaleString("en") + ")";
        row.append(swatch, series.name + " " + format(series.values[found[which]], chart.unit) + elsewhere);
        tip.append(row);
      });
      tip.hidden = false;

      const at = chart.left + ((step - chart.low) / (chart.high - chart.low)) * (chart.right - chart.left);
      line.setAttribute("d", "M" + at + " " + chart.top + "V" + chart.bottom);
      const home = figure.getBoundingClientRect();
      const left = box.left - home.left + at / scale;
      const beside = left + 12 + tip.offsetWidth > home.width ? left - 12 - tip.offsetWidth : left + 12;
      tip.style.left = Math.max(4, Math.min(beside, home.width - tip.offsetWidth - 4)) + "px";
      tip.style.top = box.top - home.top + 4 + "px";
    };

    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  });
})();
