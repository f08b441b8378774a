package limit

import (
	"strings"
	"testing"
)

func TestKeyOf(t *testing.T) {
	longest := strings.Repeat("k", MaxKey)
	for _, value := range []string{"", "alice", longest} {
		if got := KeyOf(value); got != value {
			t.Errorf("KeyOf(%.20q) = %.20q, want the value itself", value, got)
		}
	}
	// The sum is that of: printf 'k%.0s' $(seq 1025) | sha256sum
	want := strings.Repeat("k", 128) + "~sha256:011cc8dcade24f43d2d7f95605d8481da1d0b86475def49be02bfc20cee86e65"
	if got := KeyOf(longest + "k"); got != want {
		t.Errorf("KeyOf of 1025 bytes = %q, want %q", got, want)
	}
	if KeyOf(longest+"a") == KeyOf(longest+"b") {
		t.Error("two long values have one key")
	}
	for _, value := range []string{"\xff", longest + "\xff", longest + strings.Repeat("k", 400) + "\xff"} {
		if got := KeyOf(value); got != value || ValidKey(got) == nil {
			t.Errorf("KeyOf(%d bytes that are not UTF-8) = %.20q, want no key", len(value), got)
		}
	}
	// A rune of three bytes stands across the 128th byte.
	split := KeyOf("a" + strings.Repeat("€", 400))
	if err := ValidKey(split); err != nil || !strings.HasPrefix(split, "a"+strings.Repeat("€", 42)+"~sha256:") {
		t.Errorf("KeyOf cuts a rune: %q, %v", split, err)
	}
}
