package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"time"

	"github.com/weirlimit/weir/internal/netaddr"
)

// debugServer serves the runtime's profiles at /debug/pprof/. It is a server of its own, on loopback only, so that
// callers can never get a profile: it shows what a node does, and a heap dump's labels what it holds. The command line
// and the look-up of symbols of net/http/pprof are left out.
func debugServer(log *slog.Logger) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !netaddr.LoopbackHostPort(r.Host) {
				// A browser on this machine may have found this address under another name (DNS rebinding).
				http.Error(w, "ask for 127.0.0.1 or localhost", http.StatusForbidden)
				return
			}
			mux.ServeHTTP(w, r)
		}),
		ReadTimeout:    5 * time.Second,
		WriteTimeout:   time.Minute, // net/http/pprof adds the duration of the profile
		IdleTimeout:    time.Minute,
		MaxHeaderBytes: 8 << 10,
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelWarn),
	}
}

// openDebug serves the debug port, on loopback whatever the address of the other ports. If it fails later, the node
// goes on. It is closed after all parts that are opened later, so that the stop of the node can be profiled.
func (n *Node) openDebug() error {
	if n.cfg.DebugPort == PortOff {
		return nil
	}
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(max(n.cfg.DebugPort, 0)))))
	if err != nil {
		return fmt.Errorf("debug-port: %w", err)
	}
	server := debugServer(n.log)
	n.debugAddr = l.Addr().String()
	n.log.Info("profiles served", "url", "http://"+n.debugAddr+"/debug/pprof/")
	n.work.Go(func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.log.Warn("debug server failed", "error", err)
		}
	})
	n.closing(func(context.Context) { _ = server.Close() })
	return nil
}
