package client

import (
	"crypto/tls"
	"errors"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// TestTokenNeedsTLS: a token goes to other hosts over TLS only.
func TestTokenNeedsTLS(t *testing.T) {
	for _, c := range []struct {
		address, token string
		tls            *tls.Config
		ok             bool
	}{
		{"127.0.0.1:8081", "t", nil, true},
		{"[::1]:8081,localhost:8082", "t", nil, true},
		{"unix:/run/weir.sock", "t", nil, true},
		{"weir:8081", "t", nil, false},
		{"127.0.0.1:8081,192.0.2.1:8081", "t", nil, false},
		{"dns:///127.0.0.1:8081", "t", nil, true},
		{"dns://192.0.2.1/127.0.0.1:8081", "t", nil, false}, // whatever it leads to
		{"weir:8081", "t", &tls.Config{}, true},
		{"weir:8081", "", nil, true},
		{"127.0.0.1:8081", "two words", nil, false},
		{"127.0.0.1:8081", "line\n", nil, false},
	} {
		opts := []Option{WithToken(c.token)}
		if c.tls != nil {
			opts = append(opts, WithTLS(c.tls))
		}
		cl, err := Dial(t.Context(), c.address, opts...)
		expect.True(t, (err == nil) == c.ok && (err == nil || errors.Is(err, ErrInvalid)),
			"%s with %q: %v", c.address, c.token, err)
		if err == nil {
			cl.Close()
		}
	}
}
