package cluster

import (
	"bytes"
	"encoding/base64"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

func TestValidate(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*Config)
		want   string // in the error; empty: valid
	}{
		{"zero but for the name", func(c *Config) {}, ""},
		{"all", func(c *Config) {
			c.Bind, c.GossipPort, c.Advertise, c.PeerPort = "0.0.0.0", 7946, "node-1.example.com", 7947
			c.Join = []string{"weir:7946", "10.0.0.1:1", "[::1]:65535"}
			c.Keys = [][]byte{make([]byte, 16), make([]byte, 24), make([]byte, 32)}
		}, ""},
		{"IPv6", func(c *Config) { c.Bind, c.Advertise = "::", "fd00::1" }, ""},
		{"no name", func(c *Config) { c.Name = "" }, "name"},
		{"long name", func(c *Config) { c.Name = strings.Repeat("a", 64) }, "name"},
		{"name with a slash", func(c *Config) { c.Name = "a/b" }, "name"},
		{"name not ASCII", func(c *Config) { c.Name = "wéir" }, "name"},
		{"bind to a name", func(c *Config) { c.Bind = "localhost" }, "bind"},
		{"bind with a port", func(c *Config) { c.Bind = "127.0.0.1:7946" }, "bind"},
		{"bind with a zone", func(c *Config) { c.Bind = "fe80::1%eth0" }, "bind"},
		{"bind to :: only", func(c *Config) { c.Bind = "::" }, "advertise"},
		{"advertise a port", func(c *Config) { c.Advertise = "10.0.0.1:7946" }, "advertise"},
		{"advertise a port, IPv6", func(c *Config) { c.Advertise = "[::1]:7946" }, "advertise"},
		{"advertise everything", func(c *Config) { c.Advertise = "0.0.0.0" }, "advertise"},
		{"gossip port", func(c *Config) { c.GossipPort = 65536 }, "gossip-port"},
		{"negative gossip port", func(c *Config) { c.GossipPort = -1 }, "gossip-port"},
		{"peer port", func(c *Config) { c.PeerPort = -1 }, "peer-port"},
		{"HTTP port", func(c *Config) { c.HTTPPort = 70000 }, "http-port"},
		{"gRPC port", func(c *Config) { c.GRPCPort = 70000 }, "grpc-port"},
		{"seed without port", func(c *Config) { c.Join = []string{"weir:7946", "weir"} },
			`join: "weir" is not HOST:PORT`},
		{"seed with bare IPv6", func(c *Config) { c.Join = []string{"::1"} }, "join"},
		{"seed without host", func(c *Config) { c.Join = []string{":7946"} }, "join"},
		{"seed with port 0", func(c *Config) { c.Join = []string{"weir:0"} }, "join"},
		{"seed with port name", func(c *Config) { c.Join = []string{"weir:http"} }, "join"},
		{"seed with large port", func(c *Config) { c.Join = []string{"weir:65536"} }, "join"},
		{"seed with gossip name", func(c *Config) { c.Join = []string{"a/weir:7946"} }, "join"},
		{"empty seed", func(c *Config) { c.Join = []string{""} }, "join"},
		{"key", func(c *Config) { c.Keys = [][]byte{make([]byte, 16), make([]byte, 17)} },
			"gossip-key-file: key 2: has 17 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			cfg := Config{Name: "weir-0"}
			test.change(&cfg)
			err := cfg.Validate()
			switch {
			case test.want == "" && err != nil:
				t.Error(err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestParseKeys(t *testing.T) {
	encode := func(n int) string { return base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{byte(n)}, n)) }
	for _, test := range []struct{ name, text, want string }{
		{"one", encode(32), ""},
		{"some", "# new\n\n" + encode(32) + "\r\n  " + encode(16) + "\n# old\n" + encode(24) + "\n", ""},
		{"empty", "", "holds no key"},
		{"comments only", "# nothing\n\n", "holds no key"},
		{"not base64", "\nsecret!", ":2: not base64"},
		{"too many", strings.Repeat(encode(32)+"\n", MaxKeys+1), "holds 17 keys, at most 16"},
		{"short", encode(15), ":1: the key has 15 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			keys, err := ParseKeys("keys", []byte(test.text))
			if test.want == "" {
				expect.True(t, err == nil && len(keys) != 0 && len(keys[0]) == 32, "keys %x, %v", keys, err)
				return
			}
			expect.True(t, err != nil && strings.Contains(err.Error(), test.want) &&
				strings.HasPrefix(err.Error(), "keys"), "error %v, want one with the file and %q", err, test.want)
			expect.True(t, err == nil || !strings.Contains(err.Error(), "secret"),
				"the error shows what the file holds: %v", err)
		})
	}
}
