package limit

import (
	"crypto/sha256"
	"encoding/hex"
	"unicode/utf8"
)

// keptOfLong is how many bytes of a long value are the beginning of its key.
const keptOfLong = 128

// KeyOf returns the key for a value of a request, such as a header. A value of at most MaxKey bytes is its own key. The
// key of a longer value is its first 128 bytes or a few less, "~sha256:" and the SHA-256 of the whole value in
// hexadecimal digits. So a caller cannot leave its limit by making a value longer. A value that is not UTF-8 is
// returned as it is, whatever its length; ValidKey rejects it.
func KeyOf(value string) string {
	if len(value) <= MaxKey || !utf8.ValidString(value) {
		return value
	}
	end := keptOfLong
	for end > 0 && !utf8.RuneStart(value[end]) {
		end--
	}
	sum := sha256.Sum256([]byte(value))
	return value[:end] + "~sha256:" + hex.EncodeToString(sum[:])
}
