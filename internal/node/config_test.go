package node

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestConfigMistakes: a bound that makes no sense is an error that begins with its setting, and so is what does not go together.
func TestConfigMistakes(t *testing.T) {
	right := Config{Name: "a", Bind: "127.0.0.1", Timeout: time.Second, Grace: time.Second, Logger: slog.New(slog.DiscardHandler)}
	must.NoError(t, right.Validate())
	right.Limits = Limits{MaxConnections: -1, MaxConnectionsPerSource: -1, MaxConnectionAge: -1, IdleTimeout: -1, FirstMessageTimeout: 100 * time.Millisecond}
	right.MaxKeys, right.MaxMemory, right.InlineMaxWindow, right.MaxRequestIDs, right.MaxReservations = -1, -1, -1, -1, -1
	right.OTLPEndpoint, right.TraceSample, right.TraceCallerRate = "http://localhost:4317", 1, 10
	must.NoError(t, right.Validate())
	for _, c := range []struct {
		want  string
		spoil func(*Config)
	}{
		{"debug-port: ", func(c *Config) { c.DebugPort = -2 }},
		{"timeout: ", func(c *Config) { c.Timeout = 0 }},
		{"grace: ", func(c *Config) { c.Grace = 0 }},
		{"max-keys: ", func(c *Config) { c.MaxKeys = -2 }},
		{"max-memory: ", func(c *Config) { c.MaxMemory = -2 }},
		{"inline-max-window: ", func(c *Config) { c.InlineMaxWindow = -2 }},
		{"inline-max-keys: ", func(c *Config) { c.InlineMaxKeys = -1 }},
		{"inline-max-memory: ", func(c *Config) { c.InlineMaxMemory = -1 }},
		{"max-connections: ", func(c *Config) { c.Limits.MaxConnections = -2 }},
		{"max-connections-per-source: ", func(c *Config) { c.Limits.MaxConnectionsPerSource = -2 }},
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
		{"tls-cert-file: goes with tls-key-file", func(c *Config) { c.Security.TLS.Cert = "f" }},
		{"peer-tls-ca-file: goes with ", func(c *Config) { c.Security.PeerTLS.CA = "f" }},
	} {
		cfg := right
		c.spoil(&cfg)
		err := cfg.Validate()
		expect.True(t, err != nil && strings.HasPrefix(err.Error(), c.want), "%v, want %s", err, c.want)
	}
}
