package limit

import (
	"crypto/sha256"
	"encoding/hex"
	"unicode/utf8"
)

// keptOfLong is how many bytes of a long value its key begins with.
const keptOfLong = 128

// KeyOf returns the key for a value that a front end takes from a request, such as a header. A value of at most MaxKey bytes is its
// own key. The key of a longer one is its first bytes, at most 128, followed by "~sha256:" and the SHA-256 of the whole value in
// hexadecimal digits. So a long value is limited like any other, and a caller cannot leave its limit by making a value longer. A value that
// is not UTF-8 is returned as it is, whatever its length: ValidKey says what is wrong with it.
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
