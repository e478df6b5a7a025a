// Runs a generated program and calls its function with plain data; it never sees a test.
"use strict";

const isEqual = require("./lodash.isequal/index.js");
const { receive, send, encode, decode } = require("./messages.js");

// MBXP's tests share their scope with the program, so that some programs use what only the tests define.
globalThis._ = { isEqual };
globalThis.compare = (one, other) => isEqual(one, other);

function load(program, entryPoint) {
  const names = ["require", "module", "exports", "__filename", "__dirname"];
  let make;
  try {
    make = new Function(...names, `${program}\n;return ${entryPoint};`);
  } catch (error) {
    send("compile", String(error));
    return undefined;
  }
  try {
    const module = { exports: {} };
    const found = make(require, module, module.exports, __filename, __dirname);
    send("ready");
    return found;
  } catch (error) {
    send("error", String(error));
    return undefined;
  }
}

send("started");
const [program, entryPoint] = receive().map(String);
const candidate = load(program, entryPoint);
for (;;) {
  const values = decode(receive()[0]);
  try {
    send("value", encode(candidate(...values)));
  } catch (error) {
    send("error", String(error));
  }
}
