package main

import (
	"encoding/hex"
	"strings"
	"testing"

	"github.com/weirlimit/weir/ring"
)

func TestReadSecret(t *testing.T) {
	const secret = "0123456789abcdef0123456789abcdef"
	keys := func(content string) ring.HashKey {
		t.Helper()
		k, err := readSecret(writeFile(t, "secret", content))
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	// Nodes of different builds must agree: these values, worked out with another HKDF, never change.
	got := keys(secret)
	const want = "2101ffdecc97c08b97fb69c47234600e"
	if got := hex.EncodeToString(got.Bytes()); got != want {
		t.Errorf("%s, was %s", got, want)
	}
	if keys(secret) != keys(" "+secret+"\n") {
		t.Error("space around the secret counts")
	}
	if keys(secret) == keys(secret+"0") {
		t.Error("different secrets, one key")
	}
	if _, err := readSecret(writeFile(t, "secret", secret[:minSecret-1])); err == nil || strings.Contains(err.Error(), secret[:minSecret-1]) {
		t.Errorf("%v", err)
	}
}
