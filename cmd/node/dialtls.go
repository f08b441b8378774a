package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/spf13/pflag"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"github.com/weirlimit/weir/internal/certs"
	"github.com/weirlimit/weir/internal/file"
)

// clientTLS is how a command proves itself to a node, and has the node prove itself.
type clientTLS struct {
	ca, cert, key, name string
	tokenFile           string
}

func (c *clientTLS) register(fs *pflag.FlagSet) {
	fs.StringVar(&c.ca, "tls-ca-file", "", "authorities (PEM) of the node's certificate; without any of --tls-…: plain text")
	fs.StringVar(&c.cert, "tls-cert-file", "", "certificate (PEM) to present")
	fs.StringVar(&c.key, "tls-key-file", "", "private key (PEM) of --tls-cert-file")
	fs.StringVar(&c.name, "tls-server-name", "", "name in the node's certificate (default: the host of --addr)")
	fs.StringVar(&c.tokenFile, "token-file", "", "file with the token to present")
}

// encrypted reports whether TLS is spoken.
func (c *clientTLS) encrypted() bool {
	return c.ca != "" || c.cert != "" || c.key != "" || c.name != ""
}

// with returns a context in which the token, if there is one, goes along with calls to addr.
func (c *clientTLS) with(ctx context.Context, addr string) (context.Context, error) {
	token, err := c.token(addr)
	if err != nil || token == "" {
		return ctx, err
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token), nil
}

// token returns the token to present at addr, empty if there is none.
func (c *clientTLS) token(addr string) (string, error) {
	if c.tokenFile == "" {
		return "", nil
	}
	token, err := readToken(c.tokenFile)
	if err != nil {
		return "", fmt.Errorf("--token-file: %w", err)
	}
	if !c.encrypted() && !leadsHere(addr) {
		return "", fmt.Errorf("--token-file: the token would be sent to %s in plain text: give --tls-ca-file", addr)
	}
	return token, nil
}

// maxPEM is the size in bytes of the largest file of a client with a token, certificates or a key.
const maxPEM = 1 << 20

// readToken reads a token from a file of its own.
func readToken(name string) (string, error) {
	data, err := file.Read(name, maxPEM)
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(data))
	if token == "" || strings.ContainsAny(token, " \t\r\n") {
		return "", fmt.Errorf("%s: must hold one token and nothing else; make one with: weir token", name)
	}
	return token, nil
}

// transport returns the credentials of a connection to a node.
func (c *clientTLS) transport() (credentials.TransportCredentials, error) {
	config, err := c.config()
	switch {
	case err != nil:
		return nil, err
	case config == nil:
		return insecure.NewCredentials(), nil
	}
	return credentials.NewTLS(config), nil
}

// config is the same as crypto/tls has it, nil for plain text.
func (c *clientTLS) config() (*tls.Config, error) {
	if !c.encrypted() {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.name}
	if c.ca != "" {
		data, err := file.Read(c.ca, maxPEM)
		if err != nil {
			return nil, fmt.Errorf("--tls-ca-file: %w", err)
		}
		if config.RootCAs, err = certs.Authorities(data); err != nil {
			return nil, fmt.Errorf("--tls-ca-file: %s: %w", c.ca, err)
		}
	}
	if (c.cert == "") != (c.key == "") {
		return nil, errors.New("--tls-cert-file, --tls-key-file: give both or neither")
	}
	if c.cert != "" {
		cert, err := file.Read(c.cert, maxPEM)
		if err != nil {
			return nil, fmt.Errorf("--tls-cert-file: %w", err)
		}
		key, err := file.Read(c.key, maxPEM)
		if err != nil {
			return nil, fmt.Errorf("--tls-key-file: %w", err)
		}
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("--tls-cert-file, --tls-key-file: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// leadsHere reports whether an address is one on this host.
func leadsHere(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.Unmap().IsLoopback()
}
