// Runs tests whose function is elsewhere: each call becomes a message, and its answer is plain data.
"use strict";

const isEqual = require("./lodash.isequal/index.js");
const { receive, send, encode, decode } = require("./messages.js");

function library(name) {
  if (name !== "lodash") throw new Error(`tests may require lodash only, not ${name}`);
  return { isEqual };
}

function call(...values) {
  send("call", encode(values));
  const [kind, content] = receive();
  if (String(kind) !== "value") throw new Error(String(content));
  return decode(content);
}

for (;;) {
  const [test, entryPoint] = receive().map(String);
  let verdict = ["pass", ""];
  try {
    // Where a test fails, MBXP's message names a variable x that its program lacks.
    new Function(entryPoint, "require", "x", test)(call, library, undefined);
  } catch (error) {
    verdict = ["fail", String(error)];
  }
  send(...verdict);
}
