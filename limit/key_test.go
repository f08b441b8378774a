package limit

import (
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

func TestKeyOf(t *testing.T) {
	longest := strings.Repeat("k", MaxKey)
	for _, value := range []string{"", "alice", longest} {
		got := KeyOf(value)
		expect.True(t, got == value, "KeyOf(%.20q) = %.20q, want the value itself", value, got)
	}
	// The sum is that of: printf 'k%.0s' $(seq 1025) | sha256sum
	want := strings.Repeat("k", 128) + "~sha256:011cc8dcade24f43d2d7f95605d8481da1d0b86475def49be02bfc20cee86e65"
	expect.Equal(t, KeyOf(longest+"k"), want, "KeyOf of 1025 bytes")
	expect.True(t, KeyOf(longest+"a") != KeyOf(longest+"b"), "two long values have one key")
	for _, value := range []string{"\xff", longest + "\xff", longest + strings.Repeat("k", 400) + "\xff"} {
		got := KeyOf(value)
		if err := ValidKey(got); got != value || err == nil || err.Message != "is not valid UTF-8" {
			t.Errorf("KeyOf(%d bytes that are not UTF-8) = %.20q, %v, want no key", len(value), got, err)
		}
	}
	// A rune of three bytes stands across the 128th byte.
	split := KeyOf("a" + strings.Repeat("€", 400))
	if err := ValidKey(split); err != nil || !strings.HasPrefix(split, "a"+strings.Repeat("€", 42)+"~sha256:") {
		t.Errorf("KeyOf cuts a rune: %q, %v", split, err)
	}
}
