package cluster

import (
	"bytes"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

func TestMetadata(t *testing.T) {
	m := metadata{Protocol: protocol, State: Leaving, Settings: 0x1122334455667788,
		Policy: 0xaabbccdd, Peer: 7947, HTTP: 8080, GRPC: 65535, Voters: 0x0badcafe, Envoy: 0x0ddba11}
	b := m.encode()
	expect.True(t, len(b) <= 64, "metadata take %d bytes, more than 64", len(b))
	got, err := decodeMetadata(b)
	expect.True(t, err == nil && got == m, "decoded %+v, %v, want %+v", got, err, m)
	got, err = decodeMetadata(append(b, 1, 2, 3))
	expect.True(t, err == nil && got == m, "with fields of a later build: %+v, %v", got, err)
	for n := range len(b) {
		_, err := decodeMetadata(b[:n])
		expect.True(t, err != nil, "%d bytes are accepted", n)
	}
	later := bytes.Clone(b)
	later[2]++
	if got, err := decodeMetadata(later); err != nil || got != (metadata{Protocol: protocol + 1, State: Leaving}) {
		t.Errorf("of another protocol: %+v, %v, want the header", got, err)
	}
	for i, bad := range map[int]byte{0: 'X', 3: 0} {
		b := bytes.Clone(b)
		b[i] = bad
		_, err := decodeMetadata(b)
		expect.True(t, err != nil, "accepted with byte %d = %d", i, bad)
	}
}

func TestIdentity(t *testing.T) {
	id := identity{"weir-0.weir_x", 0xfedcba9876543210}
	got, err := parseIdentity(id.String())
	expect.True(t, err == nil && got == id, "parsed %+v, %v, want %+v", got, err, id)
	for _, bad := range []string{"", "/", "a", "a/", "a/1", "/0000000000000001", "a b/0000000000000001",
		"a/000000000000000g",
		"a/+000000000000001", "a/b/0000000000000001", "a/00000000000000011",
		strings.Repeat("a", 64) + "/0000000000000001"} {
		id, err := parseIdentity(bad)
		expect.True(t, err != nil, "%q is accepted as %+v", bad, id)
	}
}

func FuzzDecodeMetadata(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("WE\x01\x02"))
	f.Add([]byte("WE\x02\x02"))
	f.Add(metadata{Protocol: protocol, State: Active, Settings: 2, Policy: 3, Peer: 4, HTTP: 5, GRPC: 6,
		Voters: 7, Envoy: 8}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMetadata(b)
		if err != nil || m.Protocol != protocol {
			return
		}
		again, err := decodeMetadata(m.encode())
		expect.True(t, err == nil && again == m, "%x decodes to %+v, which is read back as %+v, %v", b, m, again, err)
	})
}

func FuzzParseIdentity(f *testing.F) {
	f.Add("a/0000000000000001")
	f.Add("weir-0/fedcba9876543210")
	f.Add("/")
	f.Fuzz(func(t *testing.T, s string) {
		id, err := parseIdentity(s)
		expect.True(t, err != nil || strings.EqualFold(id.String(), s), "%q parses to %+v", s, id)
	})
}

func TestVotersFingerprint(t *testing.T) {
	three := votersFingerprint([]string{"a", "b", "c"})
	expect.True(t, votersFingerprint([]string{"c", "a", "b"}) == three && votersFingerprint(nil) == 0,
		"the order counts, or no list is not 0")
	for _, other := range [][]string{nil, {"a", "b", "d"}, {"a"}, {"ab", "c"}, {"a", "bc"}, {"a", "b", "c", "d", "e"}} {
		expect.True(t, votersFingerprint(other) != three, "%v is taken for a, b and c", other)
	}
}
