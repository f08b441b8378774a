package node

import (
	"errors"
	"log/slog"
	"math"
	"net/http"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
	"github.com/weirlimit/weir/test/testkit/certstest"
)

// TestConfigMistakes: a bound that makes no sense is an error that begins with its setting, and so is what does not go
// together.
func TestConfigMistakes(t *testing.T) {
	right := Config{Name: "a", Bind: "127.0.0.1", Timeout: time.Second, Grace: time.Second,
		Logger: slog.New(slog.DiscardHandler)}
	must.NoError(t, right.Validate())
	right.Limits = Limits{MaxConnections: -1, MaxConnectionAge: -1, IdleTimeout: -1,
		FirstMessageTimeout: 100 * time.Millisecond}
	right.MaxKeys, right.MaxMemory, right.InlineMaxWindow, right.MaxRequestIDs, right.MaxReservations = -1, -1, -1, -1,
		-1
	right.OTLPEndpoint, right.TraceSample, right.TraceCallerRate = "http://localhost:4317", 1, 10
	right.ForwardAuthHeaders, right.TrustedProxies = []string{"x-api-key"}, []string{"10.0.0.0/8", "2001:db8::1"}
	must.NoError(t, right.Validate())
	f, err := right.forwardAuth()
	expect.True(t, err == nil && f.Headers[0] == "X-Api-Key" && len(f.TrustedProxies) == 2, "%+v, %v", f, err)
	for _, c := range []struct {
		want  string
		spoil func(*Config)
	}{
		{"debug-port: ", func(c *Config) { c.DebugPort = -2 }},
		{"timeout: ", func(c *Config) { c.Timeout = -1 }},
		{"grace: ", func(c *Config) { c.Grace = -1 }},
		{"max-keys: ", func(c *Config) { c.MaxKeys = -2 }},
		{"max-memory: ", func(c *Config) { c.MaxMemory = -2 }},
		{"inline-max-window: ", func(c *Config) { c.InlineMaxWindow = -2 }},
		{"inline-max-keys: ", func(c *Config) { c.InlineMaxKeys = -1 }},
		{"inline-max-memory: ", func(c *Config) { c.InlineMaxMemory = -1 }},
		{"max-connections: ", func(c *Config) { c.Limits.MaxConnections = -2 }},
		{"max-connections-per-source: ", func(c *Config) { c.Limits.MaxConnectionsPerSource = -1 }},
		{"max-anonymous-connections: ", func(c *Config) { c.Limits.MaxAnonymousConnections = -1 }},
		{"max-connection-age: ", func(c *Config) { c.Limits.MaxConnectionAge = time.Second - 1 }},
		{"idle-timeout: ", func(c *Config) { c.Limits.IdleTimeout = -2 }},
		{"max-streams: ", func(c *Config) { c.Limits.MaxStreams = -1 }},
		{"max-message-size: ", func(c *Config) { c.Limits.MaxMessageSize = -1 }},
		{"max-header-size: ", func(c *Config) { c.Limits.MaxHeaderSize = -1 }},
		{"max-unread: ", func(c *Config) { c.Limits.MaxUnread = -1 }},
		{"max-in-flight: ", func(c *Config) { c.Limits.MaxInFlight = -1 }},
		{"first-message-timeout: ", func(c *Config) { c.Limits.FirstMessageTimeout = -1 }},
		{"write-timeout: ", func(c *Config) { c.Limits.WriteTimeout = time.Millisecond }},
		{"trace-sample: needs a collector", func(c *Config) { c.OTLPEndpoint = "" }},
		{"trace-sample: ", func(c *Config) { c.TraceSample = 2 }},
		{"trace-caller-rate: ", func(c *Config) { c.TraceCallerRate = -1 }},
		{"trace-caller-rate: ", func(c *Config) { c.OTLPEndpoint, c.TraceSample, c.TraceCallerRate = "", 0, -1 }},
		{"otlp-endpoint: ", func(c *Config) { c.OTLPEndpoint = "localhost:4317" }},
		{"forward-auth-headers: ", func(c *Config) { c.ForwardAuthHeaders = []string{"a b"} }},
		{"forward-auth-headers: ", func(c *Config) { c.ForwardAuthHeaders = []string{"Host"} }},
		{"trusted-proxies: ", func(c *Config) { c.TrustedProxies = []string{"proxy"} }},
		{"trusted-proxies: ", func(c *Config) { c.TrustedProxies = []string{"10.0.0.1/8"} }},
		{"tls-cert-file: goes with tls-key-file", func(c *Config) { c.Security.TLSCertFile = "f" }},
		{"peer-tls-ca-file: goes with ", func(c *Config) { c.Security.PeerTLSCAFile = "f" }},
	} {
		cfg := right
		c.spoil(&cfg)
		err := cfg.Validate()
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), c.want), "%v, want %s", err, c.want)
	}
}

// useTLS and usePeerTLS set the files for callers, and between nodes.
func (c *Security) useTLS(f reload.CertFiles) {
	c.TLSCertFile, c.TLSKeyFile, c.TLSClientCAFile = f.Cert, f.Key, f.CA
}

func (c *Security) usePeerTLS(f reload.CertFiles, name string) {
	c.PeerTLSCertFile, c.PeerTLSKeyFile, c.PeerTLSCAFile, c.PeerTLSName = f.Cert, f.Key, f.CA, name
}

// TestDefaults: the text of each default can be read, and the defaults are those of the packages that know the bounds.
func TestDefaults(t *testing.T) {
	var c Config
	for _, s := range Settings(&c) {
		if s.Numeric() {
			expect.NoError(t, s.Set(s.Default), "%s", s.Name)
			expect.NoError(t, checkNumbers([]*Setting{s}), "%s", s.Name)
		} else if _, ok := s.Field.(*float64); ok {
			_, err := strconv.ParseFloat(s.Default, 64)
			expect.NoError(t, err, "%s", s.Name)
		}
		expect.True(t, s.Help != "", "%s has no help", s.Name)
	}
	c = Config{}.withDefaults()
	expect.Equal(t, c.InlineMaxWindow, limiter.DefaultInlineMaxWindow)
	expect.Equal(t, c.Timeout, limiter.DefaultTimeout)
	expect.Equal(t, [4]int{c.MaxMembers, c.MaxReservations, c.MaxKeyReservations, c.MaxRequestIDs},
		[4]int{cluster.DefaultMaxMembers, store.DefaultReservations, store.DefaultKeyReservations,
			store.DefaultRequestIDs})
	expect.True(t, c.HTTPPort == PortOff && c.Bind == "", "what is no number has a default: %+v", c)
}

// TestNumbers: a number is read in its unit and within its range, 0 stands for no bound where the setting says so, and
// nothing else does.
func TestNumbers(t *testing.T) {
	var c struct {
		Any   int           `flag:"any" default:"0"`
		Count int           `flag:"count" default:"auto" zero:"none"`
		Some  int           `flag:"some" default:"auto" range:"1.."`
		Bound time.Duration `flag:"bound" default:"1h" zero:"none"`
		Wait  time.Duration `flag:"wait" default:"1s" range:"1ms..1m"`
		Size  int64         `flag:"size" unit:"size" default:"0" range:"64KiB..1GiB"`
		State int64         `flag:"state" unit:"memory" default:"auto" zero:"none"`
		Port  Port          `flag:"port"`
	}
	settings := make(map[string]*Setting)
	for _, s := range Settings(&c) {
		settings[s.Name] = s
	}
	for _, right := range []struct {
		name, text string
		want       int64
	}{
		{"any", "0", 0}, {"any", "2147483647", math.MaxInt32}, {"count", "auto", 0}, {"count", "0", -1},
		{"count", "7", 7}, {"some", "1", 1}, {"some", "auto", 0},
		{"bound", "0", -1}, {"bound", "0s", -1}, {"bound", "1m", int64(time.Minute)},
		{"wait", "1ms", int64(time.Millisecond)}, {"wait", "60s", int64(time.Minute)},
		{"size", "0", 0}, {"size", "64KiB", 64 << 10}, {"size", "1GiB", 1 << 30}, {"state", "auto", 0},
		{"state", "0", -1}, {"state", "16MiB", 16 << 20},
		{"port", "", 0}, {"port", "0", -1}, {"port", "1", 1}, {"port", "8080", 8080}, {"port", "65535", 65535},
	} {
		s := settings[right.name]
		expect.NoError(t, s.Set(right.text), "%s %q", right.name, right.text)
		expect.True(t, s.number.Int() == right.want && s.String() == right.text, "%s %q is %d, %s", right.name,
			right.text, s.number.Int(), s)
		expect.NoError(t, checkNumbers([]*Setting{s}), "%s %q", right.name, right.text)
	}
	for name, texts := range map[string][]string{
		"any": {"-1", "", "x", "2147483648", "auto"}, "count": {"-1", ""}, "some": {"0", "-1"},
		"bound": {"-1ns", "", "5", "auto"}, "wait": {"0s", "999us", "61s"},
		"size": {"1B", "2GiB", "-1", "99999999999GiB"}, "state": {"lots", "1B", "101%"},
		"port": {"-1", "65536", "http", " 80", "80 ", "+80", "0x50", "1e3", "127.0.0.1:80", "1_0"},
	} {
		for _, text := range texts {
			before := settings[name].number.Int()
			err := settings[name].Set(text)
			expect.True(t, err != nil && strings.Contains(err.Error(), strconv.Quote(text)), "%s %q: %v", name, text,
				err)
			expect.Equal(t, settings[name].number.Int(), before, "%s after a mistake", name)
		}
	}
}

// TestDNSRebinding: a page under a name of its own gets nothing from a node on loopback, whatever it asks; names that
// are configured are answered for, there and elsewhere.
func TestDNSRebinding(t *testing.T) {
	t.Parallel()
	ask := func(n *Node, path, host string) int {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addrOf(n.listeners.http)+path, nil)
		must.NoError(t, err)
		r.Host = host
		resp := must.Value(http.DefaultClient.Do(r))(t)
		resp.Body.Close()
		typ := resp.Header.Get("Content-Type")
		expect.True(t, resp.StatusCode != http.StatusMisdirectedRequest || typ == "application/problem+json",
			"answered as %s", typ)
		return resp.StatusCode
	}
	n := mustSettle(t, testConfig(t, "a"))
	named := testConfig(t, "b")
	named.HTTPHosts = []string{"Limits.example.com"}
	b := mustSettle(t, named)
	for host, want := range map[string]int{
		"127.0.0.1": 200, "127.0.0.1:8080": 200, "[::1]:8080": 200, "[::1]": 200, "localhost": 200,
		"LocalHost:8080": 200, "localhost.": 200, "192.0.2.1": 200,
		"evil.example": 421, "evil.example:8080": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421,
	} {
		for _, path := range []string{"/", "/metrics", "/v1/status", "/healthz"} {
			expect.Equal(t, ask(n, path, host), want, "%s for %s", path, host)
		}
		expect.Equal(t, ask(b, "/", host), want, "with names, for %s", host)
	}
	for host, want := range map[string]int{"limits.example.com": 200, "limits.example.com:80": 200,
		"LIMITS.example.com.": 200, "example.com": 421} {
		expect.Equal(t, ask(b, "/", host), want, "with names, for %s", host)
	}
	expect.True(t, hostCheck("0.0.0.0", nil) == nil,
		"a node that others reach does not know all of its names, and is to answer for any")
	check := hostCheck("0.0.0.0", []string{"a.example"})
	expect.True(t, !check("b.example") && check("a.example"), "names that are given count everywhere")
	for _, bad := range []string{"", "a:80", "*.example.com", "http://a", "a."} {
		expect.ErrorContains(t, checkHosts([]string{bad}), "is not a host name", "%q", bad)
	}
}

func TestParseVoters(t *testing.T) {
	for _, c := range []struct {
		list, name string
		want       string
		says       string // of the error
	}{
		{list: "", name: "weir-0", want: ""},
		{list: "a", name: "weir-0", want: "a"},
		{list: "a,b,c", name: "weir-0", want: "a b c"},
		{list: "a,b,c,d,e", name: "z", want: "a b c d e"},
		{list: "ordinals:1", name: "weir-0", want: "weir-0"},
		{list: "ordinals:3", name: "weir-7", want: "weir-0 weir-1 weir-2"},
		{list: "ordinals:5", name: "my-weir-12", want: "my-weir-0 my-weir-1 my-weir-2 my-weir-3 my-weir-4"},
		{list: "a,b", name: "a", says: "2 voters are given: the number of voters is 1, 3 or 5"},
		{list: "a,b,c,d", name: "a", says: "4 voters are given"},
		{list: "a,b,c,d,e,f,g", name: "a", says: "7 voters are given"},
		{list: "a,b,b", name: "a", says: `"b" is given twice`},
		{list: "a,,b", name: "a", says: `"" must have 1 to 63 characters`},
		{list: "a,b,c d", name: "a", says: `"c d" must consist of`},
		{list: "a,ordinals:3,b", name: "a-0", says: `"ordinals:3" must consist of`},
		{list: "ordinals:2", name: "weir-0", says: "ordinals:2: the number of voters is 1, 3 or 5"},
		{list: "ordinals:0", name: "weir-0", says: "ordinals:0: the number"},
		{list: "ordinals:", name: "weir-0", says: "ordinals:: the number"},
		{list: "ordinals:-3", name: "weir-0", says: "ordinals:-3: the number"},
		{list: "ordinals:259", name: "weir-0", says: "ordinals:259: the number"}, // 3, of a byte
		{list: "ordinals:3", name: "weir", says: "ordinals:3: name weir does not end in an ordinal"},
		{list: "ordinals:3", name: "weir-", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: "-1", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: "weir-a1", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: "weir-01", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: "weir-99999999999", says: "does not end in an ordinal"},
		{list: "ordinals:3", name: strings.Repeat("w", 61) + "-123", says: ""},
	} {
		var list []string
		if c.list != "" {
			list = strings.Split(c.list, ",")
		}
		got, err := ParseVoters(list, c.name)
		if err == nil {
			err = checkVoters(got)
		}
		switch {
		case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
			t.Errorf("%s of %s: %q, %v; want %q", c.list, c.name, got, err, c.says)
		case c.says == "" && c.want != strings.Join(got, " ") && len(c.name) < 64:
			t.Errorf("%s of %s: %q, %v; want %s", c.list, c.name, got, err, c.want)
		}
	}
}

// swapForPipe puts a pipe, which nobody writes to, in the place of a file.
func swapForPipe(t *testing.T, file string) {
	t.Helper()
	must.NoError(t, os.Remove(file))
	must.NoError(t, syscall.Mkfifo(file, 0o600))
}

// TestFilesReplacedByPipes: every file that a node follows may become a pipe. It goes on with what it has, says so,
// takes the file that comes back, and stops.
func TestFilesReplacedByPipes(t *testing.T) {
	t.Parallel()
	var book testkit.Buffer
	ca := certstest.NewAuthority(t, "a")
	cfg := testConfig(t, "node")
	cfg.Logger = book.Logger()
	cfg.Security.useTLS(filesOf(t, ca, certstest.Leaf{DNS: []string{"localhost"}}))
	cfg.Security.usePeerTLS(filesOf(t, ca, certstest.Leaf{DNS: []string{"weir.test"}}), "weir.test")
	cfg.Security.GossipKeyFile = testkit.WriteFile(t, "keys", "MDEyMzQ1Njc4OWFiY2RlZg==\n")
	cfg.Security.AccessFile = testkit.WriteFile(t, "access.yaml",
		"callers:\n  - {name: a, identities: [\"cn:a\"], roles: [read]}\n")
	n := mustSettle(t, cfg)
	files := map[string]string{
		"policies": cfg.PolicyFile, "certificates": cfg.Security.TLSKeyFile,
		"peer_certificates": cfg.Security.PeerTLSCAFile,
		"access":            cfg.Security.AccessFile, "gossip_keys": cfg.Security.GossipKeyFile,
	}
	must.True(t, len(n.files()) == len(files), "%d files are followed, %d tested", len(n.files()), len(files))
	for _, f := range n.files() {
		name := files[f.name]
		before := must.Value(os.ReadFile(name))(t)
		swapForPipe(t, name)
		n.Reload()
		testkit.Eventually(t, f.name+" to be reported",
			func() bool { return f.Err() != nil && errors.Is(f.Err(), reload.ErrNotRegular) })
		ready, detail := n.Ready()
		expect.True(t, ready && strings.Contains(detail, f.what+" rejected: ") && strings.Contains(detail, name),
			"ready: %t, %s", ready, detail)
		testkit.Eventually(t, "the log to say so",
			func() bool { return strings.Contains(book.String(), name+": not a regular file: its mode is prw") })
		must.NoError(t, os.Remove(name))
		must.NoError(t, os.WriteFile(name, before, 0o600))
		testkit.Eventually(t, f.name+" to be taken again", func() bool { return f.Err() == nil })
	}
	for _, name := range files {
		swapForPipe(t, name)
	}
	n.Reload()
	n.Stop() // which returns
}
