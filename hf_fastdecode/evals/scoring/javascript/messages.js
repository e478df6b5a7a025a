// Messages, and values in them. A message is a list of byte strings.
"use strict";

const fs = require("fs");

// Not the standard streams: programs may read and print.
const INPUT = 3;
const OUTPUT = 4;

function read(length) {
  const buffer = Buffer.alloc(length);
  for (let done = 0; done < length; ) {
    const count = fs.readSync(INPUT, buffer, done, length - done, null);
    if (count === 0) process.exit(0); // the other side is gone
    done += count;
  }
  return buffer;
}

function receive() {
  const parts = [];
  for (let left = read(4).readUInt32BE(); left > 0; left--) parts.push(read(read(4).readUInt32BE()));
  return parts;
}

function send(...parts) {
  const pieces = [number(parts.length)];
  for (const part of parts) {
    const bytes = Buffer.isBuffer(part) ? part : Buffer.from(part);
    pieces.push(number(bytes.length), bytes);
  }
  const message = Buffer.concat(pieces);
  for (let done = 0; done < message.length; ) done += fs.writeSync(OUTPUT, message, done);
}

function number(value) {
  const bytes = Buffer.alloc(4);
  bytes.writeUInt32BE(value);
  return bytes;
}

// Values as JSON: what JSON has no form for becomes an array that begins with its kind.
function toData(value) {
  switch (typeof value) {
    case "number":
      return Number.isFinite(value) && !Object.is(value, -0) ? value : ["number", Object.is(value, -0) ? "-0" : String(value)];
    case "string":
    case "boolean":
      return value;
    case "undefined":
      return ["undefined"];
    case "bigint":
      return ["bigint", String(value)];
    case "object":
      return value === null ? null : ofObject(value);
    default:
      throw new TypeError(`a ${typeof value} is no plain data`);
  }
}

function ofObject(value) {
  if (value instanceof Number || value instanceof String || value instanceof Boolean) return toData(value.valueOf());
  if (Array.isArray(value)) return ["array", ...Array.from(value, toData)];
  if (value instanceof Map) return ["map", ...Array.from(value, ([key, item]) => [toData(key), toData(item)])];
  if (value instanceof Set) return ["set", ...Array.from(value, toData)];
  if (value instanceof Date) return ["date", toData(value.getTime())];
  const prototype = Object.getPrototypeOf(value);
  if (prototype !== Object.prototype && prototype !== null) {
    throw new TypeError(`an object of ${(value.constructor && value.constructor.name) || "a class"} is no plain data`);
  }
  return ["object", ...Object.keys(value).map((key) => [key, toData(value[key])])];
}

function ofData(data) {
  if (!Array.isArray(data)) {
    if (typeof data === "object" && data !== null) throw new TypeError("not a value");
    return data;
  }
  const [kind, ...items] = data;
  switch (kind) {
    case "number":
      return Number(items[0]);
    case "undefined":
      return undefined;
    case "bigint":
      return BigInt(items[0]);
    case "array":
      return items.map(ofData);
    case "map":
      return new Map(items.map(([key, item]) => [ofData(key), ofData(item)]));
    case "set":
      return new Set(items.map(ofData));
    case "date":
      return new Date(ofData(items[0]));
    case "object":
      return Object.fromEntries(items.map(([key, item]) => [String(key), ofData(item)]));
    default:
      throw new TypeError("not a value");
  }
}

const encode = (value) => JSON.stringify(toData(value));
const decode = (bytes) => ofData(JSON.parse(bytes.toString()));

module.exports = { receive, send, encode, decode };
