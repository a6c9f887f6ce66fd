// ES256 and the layout of signing inputs by an implementation that shares nothing with ours: Node.js and its OpenSSL.
//
// Reads one JSON object from standard input, {verify: [...], sign: [...]}, and prints {verified: [...], signed: [...]}.
// An entry has the key as SubjectPublicKeyInfo or PKCS#8 in base64 (DER), and either the whole input (`input`, hex) or
// what it is made of (`purpose`, `parts`).
import { createPrivateKey, createPublicKey, sign, verify } from "node:crypto";
import { readFileSync } from "node:fs";

function inputOf({ input, purpose, parts }) {
  if (input !== undefined) return Buffer.from(input, "hex");
  const pieces = [Buffer.from(`bettercompute.v1/${purpose}\0`, "latin1")];
  for (const part of parts.map((hex) => Buffer.from(hex, "hex"))) {
    const length = Buffer.alloc(4);
    length.writeUInt32BE(part.length);
    pieces.push(length, part);
  }
  return Buffer.concat(pieces);
}

function verified(entry) {
  try {
    const key = createPublicKey({ key: Buffer.from(entry.spki, "base64"), format: "der", type: "spki" });
    if (key.asymmetricKeyDetails.namedCurve !== "prime256v1") return false;
    return verify("sha256", inputOf(entry), { key, dsaEncoding: "ieee-p1363" }, Buffer.from(entry.signature, "hex"));
  } catch {
    return false;
  }
}

function signed(entry) {
  const key = createPrivateKey({ key: Buffer.from(entry.pkcs8, "base64"), format: "der", type: "pkcs8" });
  return sign("sha256", inputOf(entry), { key, dsaEncoding: "ieee-p1363" }).toString("hex");
}

const { verify: toVerify = [], sign: toSign = [] } = JSON.parse(readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify({ verified: toVerify.map(verified), signed: toSign.map(signed) }));
