// A conversation is a tree of messages; what is shown is the path to one leaf.
//
// A node: {id, chat, parent, order, role, content} and, by role, `images` (data URLs), `calls`
// ([{id, name, arguments}]), `call` (which call a tool's result answers), `reasoning`, `state`
// ("streaming", "done", "stopped", "interrupted" or "failed"), `error`, `finish`, `model`, `stats`.

const families = new WeakMap(); // of nodes, which are added and never change their parents

/** The children of a node (null: the first messages) in the order in which they came. */
export function children(nodes, parent) {
  let found = families.get(nodes);
  if (found?.size !== nodes.size) {
    found = { size: nodes.size, of: Map.groupBy(nodes.values(), (node) => node.parent) };
    for (const siblings of found.of.values()) siblings.sort((a, b) => a.order - b.order);
    families.set(nodes, found);
  }
  return found.of.get(parent) ?? [];
}

/** From the first message to a leaf. */
export function pathTo(nodes, leaf) {
  const path = [];
  for (let node = nodes.get(leaf); node && path.length <= nodes.size; node = nodes.get(node.parent)) {
    path.push(node);
  }
  return path.reverse();
}

/** The leaf below a node that is reached by its newest children. */
export function newestLeaf(nodes, id) {
  let leaf = id;
  for (let left = nodes.size; left; left -= 1) {
    const next = children(nodes, leaf).at(-1);
    if (!next) break;
    leaf = next.id;
  }
  return leaf;
}

/** `{at, ids}`: which of its siblings a node is. */
export function branches(nodes, node) {
  const ids = children(nodes, node.parent).map((sibling) => sibling.id);
  return { at: ids.indexOf(node.id), ids };
}
