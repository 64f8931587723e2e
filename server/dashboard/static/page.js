// Puts words into the page, and leaves alone what says them already.

export const byId = (id) => document.getElementById(id);

export function setText(id, text) {
  const element = byId(id);
  // Writing the same again would have screen readers speak again.
  if (element.textContent !== text) element.textContent = text;
}

/** Fill a container with paragraphs, leaving it alone where nothing changed. */
export function fill(id, texts, className) {
  const container = byId(id);
  if (texts.join("\n") === [...container.children].map((child) => child.textContent).join("\n")) return;
  container.replaceChildren(
    ...texts.map((text) => {
      const paragraph = document.createElement("p");
      paragraph.className = className;
      paragraph.textContent = text;
      return paragraph;
    }),
  );
}

/**
 * Fill the body of a table.
 *
 * @param {string} id the body's
 * @param {{head: string, more?: string, cells: string[], className?: string}[]} lines
 */
export function rows(id, lines) {
  byId(id).replaceChildren(
    ...lines.map(({ head, more, cells, className = "" }) => {
      const row = document.createElement("tr");
      row.className = className;
      const th = document.createElement("th");
      th.scope = "row";
      th.textContent = head;
      if (more) {
        const small = document.createElement("span");
        small.className = "small";
        small.textContent = more;
        th.append(small);
      }
      row.append(th);
      for (const cell of cells) {
        const td = document.createElement("td");
        td.className = "n";
        td.textContent = cell;
        row.append(td);
      }
      return row;
    }),
  );
}

/** Fill a table whose lines come and go; where there are none, say so in its place. */
export function rowsOrNone(id, lines) {
  rows(id, lines);
  byId(id).parentElement.hidden = lines.length === 0;
  byId(`${id}-none`).hidden = lines.length > 0;
}
