"use strict";
(async () => {
  const [STEP, PROMPT, COMPLETION, ANSWER, REWARD, REWARDS, ENDING, LENGTH, TOKENS] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
  const ROW_HEIGHT = 54;
  const $ = (id) => document.getElementById(id);
  const number = (value) => value === null || value === undefined ? "–" : +(+value).toPrecision(4) + "";
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  const bytes = Uint8Array.from(atob($("data").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = JSON.parse(await new Response(stream).text());
  const runs = data.runs;

  for (const run of runs) {
    run.ofPrompt = new Map();
    run.rows.forEach((row, index) => {
      if (!run.ofPrompt.has(row[PROMPT])) run.ofPrompt.set(row[PROMPT], []);
      run.ofPrompt.get(row[PROMPT]).push(index);
    });
    run.indexOfText = new Map(run.prompts.map((text, index) => [text, index]));
  }
  if (runs.length > 1) {
    $("run-choice").hidden = false;
    runs.forEach((run, index) => $("run").append(new Option(run.name, index)));
  }
  let run, shown = [], selected = -1, count = 0;

  // [score, step, completion, prompt] of a position in the list
  function entry(position) {
    const row = run.rows[shown[position]];
    return [scoreOf(row), row[STEP], row[COMPLETION], run.prompts[row[PROMPT]].slice(run.begins[row[PROMPT]])];
  }

  const scoreOf = (row) => {
    const choice = $("verifier").value;
    return choice === "" ? row[REWARD] : row[REWARDS][+choice] ?? null;
  };
  const changeOf = (row) => {
    const rows = run.ofPrompt.get(row[PROMPT]).map((index) => run.rows[index]);
    const first = Math.min(...rows.map((one) => one[STEP]));
    if (first === row[STEP]) return 0;
    const early = rows.filter((one) => one[STEP] === first).map(scoreOf);
    return scoreOf(row) - early.reduce((sum, value) => sum + value, 0) / early.length;
  };

  function chooseRun() {
    run = runs[+($("run").value || 0)];
    $("verifier").replaceChildren(new Option("total reward", ""), ...run.verifiers.map((name, i) => new Option(name, i)));
    filter();
  }

  function filter() {
    const text = $("text").value.toLowerCase();
    const limit = (id, otherwise) => $(id).value === "" ? otherwise : +$(id).value;
    const [from, to] = [limit("from", -Infinity), limit("to", Infinity)];
    const [low, high] = [limit("low", -Infinity), limit("high", Infinity)];
    const ending = $("ending").value;
    const fits = text ? new Set(run.prompts.flatMap((one, i) => one.toLowerCase().includes(text) ? [i] : [])) : null;
    shown = [];
    run.rows.forEach((row, index) => {
      if (row[STEP] < from || row[STEP] > to || (ending && row[ENDING] !== ending)) return;
      const score = scoreOf(row);
      if ((score ?? -Infinity) < low || (score ?? Infinity) > high) return;
      if (fits && !fits.has(row[PROMPT]) && !row[COMPLETION].toLowerCase().includes(text)) return;
      shown.push(index);
    });
    const order = $("order").value, key = order.replace("-", ""), sign = order.startsWith("-") ? -1 : 1;
    const value = { step: (row) => row[STEP], score: scoreOf, length: (row) => row[LENGTH], change: changeOf }[key];
    const keys = new Map(shown.map((index) => [index, value(run.rows[index]) ?? 0]));
    shown.sort((a, b) => sign * (keys.get(a) - keys.get(b)) || a - b);
    $("count").textContent = `${shown.length.toLocaleString()} of ${run.rows.length.toLocaleString()} samples`;
    $("spacer").style.height = `${shown.length * ROW_HEIGHT}px`;
    $("list").scrollTop = 0;
    count = shown.length;
    selected = count ? 0 : -1;
    draw();
    showDetail();
  }

  function draw() {
    const list = $("list");
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 4);
    const last = Math.min(count, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 8);
    const items = [];
    for (let position = first; position < last; position++) {
      const [score, step, completion, prompt] = entry(position);
      const item = make("div", "item");
      item.style.top = `${position * ROW_HEIGHT}px`;
      item.setAttribute("role", "option");
      item.setAttribute("aria-selected", position === selected);
      item.dataset.position = position;
      item.append(make("span", "step", step), make("span", "", completion.trim() || "(empty)"), make("span", "score", number(score)));
      item.append(make("span", "small", prompt.replace(/<\|\w+\|>/g, " ").trim()));
      items.push(item);
    }
    list.replaceChildren($("spacer"), ...items);
  }

  function conversation(text) {
    const box = make("div", "text");
    // The marks of ChatML; other templates are shown as they are.
    for (const part of text.split(/(<\|im_start\|>(?:\w+\n)?|<\|im_end\|>\n?)/)) {
      if (part.startsWith("<|im_start|>")) {
        if (part.endsWith("\n")) box.append(make("span", "role", part.slice(12, -1)));
      } else if (!part.startsWith("<|im_end|>")) box.append(part);
    }
    return box;
  }

  function shaded(row) {
    const [tokens, advantages, generator, trainer] = row[TOKENS];
    const box = make("div");
    const difference = generator && trainer ? generator.map((value, i) => trainer[i] - value) : null;
    const kinds = [["advantage", advantages], ["log-prob of the generator", generator],
      ["log-prob of the trainer", trainer], ["trainer less generator", difference]].filter((kind) => kind[1]);
    const text = make("div", "text");
    const legend = make("div", "legend quiet");
    const choice = make("select");
    choice.setAttribute("aria-label", "What the shades mean");
    kinds.forEach(([name], index) => choice.append(new Option(name, index)));
    const words = make("span");
    legend.append(choice, words);
    const paint = () => {
      const values = kinds[+choice.value][1];
      const largest = Math.max(1e-12, ...values.map((value) => Math.abs(value ?? 0)));
      words.textContent = `green above 0, red below; the deepest is ${number(largest)}`;
      text.replaceChildren(...tokens.map((token, index) => {
        const value = values[index];
        const span = make("span", "token", token);
        if (value === null || value === undefined) return span;
        const shade = 0.55 * Math.abs(value) / largest;
        span.style.background = `rgb(var(--${value < 0 ? "bad" : "good"}) / ${shade.toFixed(3)})`;
        span.title = kinds.map(([name, all]) => `${name} ${number(all[index])}`).join("\n");
        return span;
      }));
    };
    if (!kinds.length) { text.textContent = row[COMPLETION]; box.append(text); return box; }
    choice.addEventListener("change", paint);
    paint();
    box.append(legend, text);
    return box;
  }

  function sample(owner, row) {
    const box = make("div");
    box.append(make("h2", "", `${runs.length > 1 ? owner.name + ", completion" : "Completion"} at step ${row[STEP]}`));
    box.append(row[TOKENS] ? shaded(row) : make("div", "text", row[COMPLETION]));
    const facts = make("div", "facts");
    const fact = (name, value) => { const one = make("span", "quiet", `${name} `); one.append(make("b", "", value)); facts.append(one); };
    fact("reward", number(row[REWARD]));
    owner.verifiers.forEach((name, index) => fact(name, number(row[REWARDS][index])));
    fact("ended by", row[ENDING] === "stop" ? "its end token" : "the limit");
    fact(row[TOKENS] ? "tokens" : "characters", row[LENGTH].toLocaleString());
    box.append(facts);
    return box;
  }

  // What is said of a place in the list: its row, prompt, the other run's row (undefined: no other run) and the history,
  // each [place in the list or -1, step, score, whether it is this one].
  function look(position) {
    const row = run.rows[shown[position]], prompt = run.prompts[row[PROMPT]];
    const all = run.ofPrompt.get(row[PROMPT]);
    const places = new Map(all.length > 1 ? shown.map((index, place) => [index, place]) : []);
    const history = all.map((index) => [places.get(index) ?? -1, run.rows[index][STEP], scoreOf(run.rows[index]), index === shown[position]]);
    const other = runs.length > 1 ? runs[1 - runs.indexOf(run)] : null;
    if (!other) return { row, prompt, history };
    const same = (other.ofPrompt.get(other.indexOfText.get(prompt)) ?? []).map((i) => other.rows[i]);
    const own = all.map((i) => run.rows[i]).filter((one) => one[STEP] === row[STEP]).indexOf(row);
    const distance = Math.min(...same.map((one) => Math.abs(one[STEP] - row[STEP])));
    const nearest = same.filter((one) => Math.abs(one[STEP] - row[STEP]) === distance);
    return { row, prompt, history, other: nearest.length ? nearest[Math.min(own, nearest.length - 1)] : null };
  }

  function showDetail() {
    const detail = $("detail"), position = selected;
    if (position < 0) { detail.replaceChildren(make("p", "quiet", "No sample fits.")); return; }
    const { row, prompt, other, history } = look(position);
    const parts = [make("h2", "", "Prompt"), conversation(prompt)];
    if (row[ANSWER]) parts.push(make("h2", "", "Reference answer"), make("div", "text", row[ANSWER]));
    const sides = make("div", "sides");
    sides.append(sample(run, row));
    if (other !== undefined) {
      const owner = runs[1 - runs.indexOf(run)];
      sides.append(other ? sample(owner, other) : make("p", "quiet", `${owner.name} has no sample of this prompt.`));
    }
    parts.push(sides);
    if (history.length > 1) {
      const box = make("div", "history");
      for (const [place, step, score, isHere] of history) {
        const button = make("button", isHere ? "here" : "", `${step}: ${number(score)}`);
        button.type = "button";
        button.addEventListener("click", () => { if (place >= 0) select(place); });
        box.append(button);
      }
      parts.push(make("h2", "", "All samples of this prompt (step: score)"), box);
    }
    detail.replaceChildren(...parts);
    detail.scrollTop = 0;
  }

  function select(position) {
    selected = Math.max(0, Math.min(count - 1, position));
    const list = $("list"), top = selected * ROW_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
    draw();
    showDetail();
  }

  $("list").addEventListener("scroll", draw);
  $("list").addEventListener("click", (event) => {
    const item = event.target.closest(".item");
    if (item) select(+item.dataset.position);
  });
  $("list").addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !count) return;
    event.preventDefault();
    select(selected + move);
  });
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("input", (event) => event.target.id === "run" ? chooseRun() : filter());
  addEventListener("resize", draw);
  // A link may say what is shown: samples.html#text=apples&order=-score
  const wished = new URLSearchParams(location.hash.slice(1));
  if (wished.has("run")) $("run").value = wished.get("run");
  chooseRun();
  for (const [id, value] of wished) if ($("filters").elements[id]) $(id).value = value;
  if (wished.size) filter();
})();
