package main

import (
	"crypto/tls"
	"fmt"
	"os"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weirlimit/weir/certs"
)

// clientTLS is how a command proves itself to a node, and has the node prove itself.
type clientTLS struct {
	ca, cert, key, name string
}

func (c *clientTLS) register(fs *pflag.FlagSet) {
	fs.StringVar(&c.ca, "tls-ca-file", "", "authorities (PEM) of the node's certificate; without any of --tls-…: plain text")
	fs.StringVar(&c.cert, "tls-cert-file", "", "certificate (PEM) to present")
	fs.StringVar(&c.key, "tls-key-file", "", "private key (PEM) of --tls-cert-file")
	fs.StringVar(&c.name, "tls-server-name", "", "name in the node's certificate (default: the host of --addr)")
}

// encrypted reports whether TLS is spoken.
func (c *clientTLS) encrypted() bool { return *c != clientTLS{} }

// dialOptions returns the credentials for a connection to a node.
func (c *clientTLS) dialOptions() ([]grpc.DialOption, error) {
	if !c.encrypted() {
		return []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: c.name}
	if c.ca != "" {
		data, err := os.ReadFile(c.ca)
		if err != nil {
			return nil, fmt.Errorf("--tls-ca-file: %w", err)
		}
		if config.RootCAs, err = certs.Authorities(data); err != nil {
			return nil, fmt.Errorf("--tls-ca-file: %s: %w", c.ca, err)
		}
	}
	if (c.cert == "") != (c.key == "") {
		return nil, fmt.Errorf("--tls-cert-file, --tls-key-file: give both or neither")
	}
	if c.cert != "" {
		pair, err := tls.LoadX509KeyPair(c.cert, c.key)
		if err != nil {
			return nil, fmt.Errorf("--tls-cert-file, --tls-key-file: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(config))}, nil
}
