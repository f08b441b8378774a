package node

import (
	"log/slog"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/internal/reload"
	"github.com/weirlimit/weir/limiter"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestConfigMistakes: a bound that makes no sense is an error that begins with its setting, and so is what does not go together.
func TestConfigMistakes(t *testing.T) {
	right := Config{Name: "a", Bind: "127.0.0.1", Timeout: time.Second, Grace: time.Second, Logger: slog.New(slog.DiscardHandler)}
	must.NoError(t, right.Validate())
	right.Limits = Limits{MaxConnections: -1, MaxConnectionAge: -1, IdleTimeout: -1, FirstMessageTimeout: 100 * time.Millisecond}
	right.MaxKeys, right.MaxMemory, right.InlineMaxWindow, right.MaxRequestIDs, right.MaxReservations = -1, -1, -1, -1, -1
	right.OTLPEndpoint, right.TraceSample, right.TraceCallerRate = "http://localhost:4317", 1, 10
	must.NoError(t, right.Validate())
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
		{"trusted-proxies: ", func(c *Config) { c.TrustedProxies = []string{"proxy"} }},
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
		[4]int{cluster.DefaultMaxMembers, store.DefaultReservations, store.DefaultKeyReservations, store.DefaultRequestIDs})
	expect.True(t, c.HTTPPort == PortOff && c.Bind == "", "what is no number has a default: %+v", c)
}

// TestNumbers: a number is read in its unit and within its range, 0 stands for no bound where the setting says so, and nothing else does.
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
		{"any", "0", 0}, {"any", "2147483647", math.MaxInt32}, {"count", "auto", 0}, {"count", "0", -1}, {"count", "7", 7}, {"some", "1", 1}, {"some", "auto", 0},
		{"bound", "0", -1}, {"bound", "0s", -1}, {"bound", "1m", int64(time.Minute)}, {"wait", "1ms", int64(time.Millisecond)}, {"wait", "60s", int64(time.Minute)},
		{"size", "0", 0}, {"size", "64KiB", 64 << 10}, {"size", "1GiB", 1 << 30}, {"state", "auto", 0}, {"state", "0", -1}, {"state", "16MiB", 16 << 20},
		{"port", "", 0}, {"port", "0", -1}, {"port", "1", 1}, {"port", "8080", 8080}, {"port", "65535", 65535},
	} {
		s := settings[right.name]
		expect.NoError(t, s.Set(right.text), "%s %q", right.name, right.text)
		expect.True(t, s.number.Int() == right.want && s.String() == right.text, "%s %q is %d, %s", right.name, right.text, s.number.Int(), s)
		expect.NoError(t, checkNumbers([]*Setting{s}), "%s %q", right.name, right.text)
	}
	for name, texts := range map[string][]string{
		"any": {"-1", "", "x", "2147483648", "auto"}, "count": {"-1", ""}, "some": {"0", "-1"}, "bound": {"-1ns", "", "5", "auto"}, "wait": {"0s", "999us", "61s"},
		"size": {"1B", "2GiB", "-1", "99999999999GiB"}, "state": {"lots", "1B", "101%"},
		"port": {"-1", "65536", "http", " 80", "80 ", "+80", "0x50", "1e3", "127.0.0.1:80", "1_0"},
	} {
		for _, text := range texts {
			before := settings[name].number.Int()
			err := settings[name].Set(text)
			expect.True(t, err != nil && strings.Contains(err.Error(), strconv.Quote(text)), "%s %q: %v", name, text, err)
			expect.Equal(t, settings[name].number.Int(), before, "%s after a mistake", name)
		}
	}
}
