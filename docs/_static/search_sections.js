// Lead each result of the search to the section of its page that fits the query best.
// conf.py writes `SECTIONS`: page → [anchor, title, text in lower case] of each section.
const bestSection = (page, phrase, words) => {
  let best = null;
  for (const [anchor, title, text] of SECTIONS[page] || []) {
    const heading = title.toLowerCase();
    const found = words.filter((word) => text.includes(word)).length;
    const inHeading = words.filter((word) => heading.includes(word)).length;
    let score = 5 * found + 5 * inHeading;
    if (found === words.length) score += 10;
    if (text.includes(phrase)) score += 15;
    if (heading.includes(phrase)) score += 15;
    if (best === null || score > best.score) best = { anchor, title, score };
  }
  return best;
};

const searchPages = Search._performSearch;
Search._performSearch = (query, stems, excluded, words, names) => {
  const results = searchPages(query, stems, excluded, words, names);
  const phrase = query.toLowerCase().trim();
  for (const result of results) {
    const [page, title, anchor] = result;
    const best = anchor ? null : bestSection(page, phrase, [...words]);
    if (best === null) continue;
    result[4] = best.score;
    if (best.title === title) continue;
    result[1] = `${title} › ${best.title}`;
    result[2] = `#${best.anchor}`;
  }
  return results.sort((a, b) => a[4] - b[4]);
};
