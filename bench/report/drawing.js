{
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const rowsOf = ({fields, rows}) => rows.map(row => Object.fromEntries(fields.map((field, at) => [field, row[at]])));
  const options = {renderer: "canvas", actions: {export: true, source: false, compiled: false, editor: false}};
  const room = document.querySelector(".blocks").clientWidth - 90; // beside an axis
  const shown = {};
  for (const [id, chart] of Object.entries(page.charts)) {
    chart.width = Math.min(chart.width, Math.max(room, 120));
    const datasets = {...chart.datasets};
    for (const {data} of [chart, ...(chart.layer || [])])
      if (data && page.datasets[data.name]) datasets[data.name] = rowsOf(page.datasets[data.name]);
    shown[id] = vegaEmbed("#" + id, {...chart, datasets}, options);
  }

  // One head on the matrix: queries down, keys to the right, of which those up to the query are seen.
  const SIDE = 300, LINES = 24, CELLS = 32;
  const element = (parent, name, attributes) => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    parent.append(found);
    return found;
  };
  const points = list => list.map(([x, y]) => `${x * SIDE},${y * SIDE}`).join(" ");
  const band = (from, width) => points([[0, from], [1 - from, 1], [Math.max(0, 1 - from - width), 1], [0, Math.min(1, from + width)]]);
  const spread = (count, start) => Array.from({length: count}, (_, at) => (start + (at + 1) * 0.618034) % 1);
  const draw = (svg, shape, colour) => {
    svg.replaceChildren();
    const clip = element(element(svg, "defs", {}), "clipPath", {id: svg.id + "-seen"});
    element(clip, "polygon", {points: points([[0, 0], [1, 1], [0, 1]])});
    element(svg, "polygon", {points: points([[0, 0], [1, 1], [0, 1]]), fill: "#7f7f7f", opacity: 0.18});
    const inside = element(svg, "g", {"clip-path": `url(#${svg.id}-seen)`, fill: colour});
    const least = 1.2 / SIDE; // to be seen
    if (shape.sink) element(inside, "rect", {x: 0, y: 0, width: Math.max(least, shape.sink) * SIDE, height: SIDE});
    if (shape.recent) element(inside, "polygon", {points: band(0, Math.max(least, shape.recent))});
    const drawn = share => Math.min(LINES, Math.max(1, Math.round(share / least)));
    if (shape.columns) for (const x of spread(drawn(shape.columns), 0.1))
      element(inside, "rect", {x: x * SIDE, y: 0, width: shape.columns / drawn(shape.columns) * SIDE, height: SIDE, opacity: 0.8});
    if (shape.diagonals) for (const at of spread(drawn(shape.diagonals), 0.3))
      element(inside, "polygon", {points: band(at * at, shape.diagonals / drawn(shape.diagonals)), opacity: 0.8});
    const tiles = Math.min(CELLS, Math.round(shape.tiles * CELLS));
    for (let row = 0; tiles && row < CELLS; row++)
      for (const x of spread(Math.min(row + 1, tiles), ((row >> 1) * 0.379) % 1))
        element(inside, "rect", {x: Math.floor(x * (row + 1)) * SIDE / CELLS, y: row * SIDE / CELLS, width: SIDE / CELLS, height: SIDE / CELLS, opacity: 0.8});
    for (const [text, x, y, anchor] of [["keys →", SIDE, SIDE + 15, "end"], ["queries ↓", 16, 10, "start"]])
      element(svg, "text", {class: "axis", x, y, "text-anchor": anchor}).textContent = text;
  };
  for (const [id, sketch] of Object.entries(page.sketches)) {
    const heads = rowsOf(page.datasets[sketch.heads]), shapes = rowsOf(page.datasets[sketch.shapes]);
    const box = document.getElementById(id), controls = document.createElement("div"), said = document.createElement("p");
    const svg = element(box, "svg", {id: id + "-svg", viewBox: `-2 -2 ${SIDE + 4} ${SIDE + 24}`, role: "img", "aria-label": "One head on the matrix"});
    const [layer, head] = ["layer", "head"].map(name => {
      const label = document.createElement("label"), input = document.createElement("input");
      Object.assign(input, {type: "number", min: 0, max: Math.max(...heads.map(one => one[name]))});
      label.append(name + " ", input);
      controls.append(label);
      return input;
    });
    controls.className = "controls";
    box.prepend(controls);
    box.append(said);
    const pick = chosen => {
      layer.value = chosen.layer;
      head.value = chosen.head;
      draw(svg, shapes[chosen.sketch], page.colours[chosen.pattern] || "#7f7f7f");
      const density = chosen.density == null ? "" : `; density ${chosen.density}`;
      said.textContent = `${chosen.pattern} ${chosen.parameters}${density}`;
    };
    const typed = () => {
      const found = heads.find(one => one.layer === +layer.value && one.head === +head.value);
      if (found) pick(found);
    };
    for (const input of [layer, head]) input.addEventListener("input", typed);
    for (const chart of sketch.charts)
      shown[chart].then(({view}) => view.addEventListener("click", (_, item) => item && item.datum && "sketch" in item.datum && pick(item.datum)));
    pick(heads.find(one => one.pattern !== "dense") || heads[0]);
  }
}
